"""What makes, reads and checks model repositories, without a server."""
