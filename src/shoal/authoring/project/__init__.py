"""User projects: import of existing models as model folders, and skeletons for new components and pipelines."""
