"""What an agent's request asks for, and its answer, in three protocols; each is imported with its first request."""
