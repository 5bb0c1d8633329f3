"""What stands in a repository, read without running or raising."""
