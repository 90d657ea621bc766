"""What Dynamo traces of a sharded model, and all that is known of Dynamo; not which parameters share collectives."""
