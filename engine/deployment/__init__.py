"""Files that start a run by Slurm, Docker Compose or Kubernetes."""
