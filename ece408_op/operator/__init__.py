"""The operator as MXNet sees it; below the course nothing else knows of MXNet."""
