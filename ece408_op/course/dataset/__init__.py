"""Fashion-MNIST: search, download, verification, resizing and reading."""
