"""What AWS machines are and cost: the catalog, list prices, spot prices."""
