"""Matrix products, with prologues and epilogues. They know no norm."""
