"""What tests need to exercise hyper_parallel without accelerator hardware."""
