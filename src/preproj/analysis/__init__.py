"""What the layers learned."""
