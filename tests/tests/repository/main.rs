//! The repository itself: documents, requirements, layers, others' crates.

mod dependencies;
mod docs;
mod face;
mod gate;
mod layers;
mod requirements;
