"""What other libraries lack to train sharded models; import what you use, as no library is imported here."""
