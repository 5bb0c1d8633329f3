"""What is measured, compared and explained."""
