"""Pure decisions on plain records: which requests share a bucket, and when each bucket is launched and waited for.

It must not know graphs, modules or process groups.
"""
