//! Gives each anonymous type a name, and puts it before the type that holds it.

use crate::ast::{Base, Body, Declaration, Definition, Shape, TypeBody};
use crate::schema::Name;

/// Moves each anonymous type out of its owner, with the name `owner_field`.
///
/// The name of a typedef becomes the name of its anonymous type.
pub(crate) fn hoist(definitions: Vec<Definition>) -> Vec<Definition> {
    let mut out = Vec::new();
    for mut definition in definitions {
        let name = definition.name.text.clone();
        match &mut definition.body {
            Body::Type(body) => hoist_body(&name, body, &mut out),
            Body::Typedef(Declaration { base: Base::Inline(body), shape: Shape::Single, .. }) => {
                hoist_body(&name, body, &mut out);
                definition.body = Body::Type(body.clone());
            }
            Body::Typedef(declaration) => hoist_declaration(&name, "item", declaration, &mut out),
            Body::Constant(_) | Body::Program(..) => {}
        }
        out.push(definition);
    }
    out
}

fn hoist_body(owner: &str, body: &mut TypeBody, out: &mut Vec<Definition>) {
    let declarations: Vec<&mut Declaration> = match body {
        TypeBody::Enum(_) => Vec::new(),
        TypeBody::Struct(fields) => fields.iter_mut().collect(),
        TypeBody::Union(union) => {
            let arms = union.arms.iter_mut().filter_map(|arm| arm.field.as_mut());
            std::iter::once(&mut *union.switch).chain(arms).collect()
        }
    };
    for declaration in declarations {
        let field = declaration.name.text.clone();
        hoist_declaration(owner, &field, declaration, out);
    }
}

fn hoist_declaration(owner: &str, field: &str, declaration: &mut Declaration, out: &mut Vec<Definition>) {
    if !matches!(declaration.base, Base::Inline(_)) {
        return;
    }
    let name = Name::new(format!("{owner}_{field}"), declaration.name.at.clone());
    if let Base::Inline(mut body) = std::mem::replace(&mut declaration.base, Base::Named(name.clone())) {
        hoist_body(&name.text, &mut body, out);
        out.push(Definition { name, body: Body::Type(body) });
    }
}
