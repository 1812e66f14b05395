"""RMSNorm of each head and rotary position embedding, between the product of queries and keys and attention."""
