"""A project of a user's own: model folders made from models they have, and skeletons for what they write."""
