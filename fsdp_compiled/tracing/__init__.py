"""What Dynamo traces of a sharded model, and all that is known of Dynamo.

``sharded_module`` makes reading a parameter a property, ``reads`` says what a read becomes in a graph, and tracing
begins in ``root_call``. It must not know which parameters share a collective.
"""
