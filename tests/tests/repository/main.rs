//! Checks of the repository: documents, requirements, layers, dependencies.

mod dependencies;
mod docs;
mod face;
mod gate;
mod layers;
mod packages;
mod requirements;
mod source;
