"""Row programs: norms, and the ops that are nothing else."""
