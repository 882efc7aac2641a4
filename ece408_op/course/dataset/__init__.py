"""Fashion-MNIST: found, downloaded, checked, resized, read."""
