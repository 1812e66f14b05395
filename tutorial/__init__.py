"""What one reads and runs to learn: see README.md here."""
