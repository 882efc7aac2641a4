"""Jobs of several processes: workers, and the servers and scheduler of MXNet's KVStore."""
