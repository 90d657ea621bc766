"""One parameter: its storage and three states, its gradients, all-gather extensions."""
