"""Development programs of this repository. The installed package does not contain them."""
