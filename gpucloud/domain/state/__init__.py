"""What is stored of a job: what is wanted (the order), what is so (the state), and who may say it."""
