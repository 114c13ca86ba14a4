"""AWS: node groups, market, quotas, images, identity and the bucket; everything that Terraform must not do."""
