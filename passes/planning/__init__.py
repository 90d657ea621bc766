"""Pure decisions on plain records: which requests share a bucket, and when each is launched and waited for."""
