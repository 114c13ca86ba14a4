"""The gate on the node: look, put to work, judge, write down."""
