"""Who decides: the Controller protocol, the features it may read, and controllers."""
