"""What other libraries recognise PyTorch's FSDP2 by: its function, its policies, its records on modules, its names.

It must not know what sharding does.
"""
