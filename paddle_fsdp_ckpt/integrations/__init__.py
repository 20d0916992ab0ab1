"""What joins this package to others; each module imports the one that it is named after."""
