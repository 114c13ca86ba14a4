"""What Terraform makes: the base of a region, a cluster for a job."""
