"""The operator's MXNet interface; below the course only this package uses MXNet."""
