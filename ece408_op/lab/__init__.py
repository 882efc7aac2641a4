"""Lab for users' kernel files: checking, timing and ranking in isolated processes."""
