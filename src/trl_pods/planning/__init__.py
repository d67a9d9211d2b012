"""`trl-pods plan`: what a few measured steps say about other n and m."""
