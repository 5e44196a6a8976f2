# so that `import data.folder` is this folder, whatever else is installed under that name
