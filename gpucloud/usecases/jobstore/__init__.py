"""A job in its store: state, orders, lease, records, report."""
