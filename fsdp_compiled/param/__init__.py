"""One parameter: its storage and three states, its traced read, its gradients, all-gather extensions.

It must not know which parameters share a collective, nor hooks or streams.
"""
