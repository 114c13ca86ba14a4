"""Hosts that exist already, as a cloud: taken and given back over SSH, never made and never switched off."""
