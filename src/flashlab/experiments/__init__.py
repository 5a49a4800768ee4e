"""What one page or one experiment needs. Nothing imports it; each module registers itself."""
