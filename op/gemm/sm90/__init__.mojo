"""Products on Hopper's tensor cores, by wgmma and TMA."""
