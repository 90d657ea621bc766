"""What other libraries recognise PyTorch's FSDP2 by: its function, policies, names and records on modules."""
