"""Matrix products, with prologues and epilogues, independent of norms."""
