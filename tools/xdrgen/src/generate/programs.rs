//! Generation of programs: signatures, server traits and clients.

use proc_macro2::{Ident, Literal, TokenStream};
use quote::{format_ident, quote};

use super::docs;
use super::model::Model;
use super::names::{Scope, common_prefix};
use crate::schema::{Eligible, Placement, Procedure, Program, Run, Schema, Type, Version};

/// Default of `max_inline_result` in the placement file, in bytes.
const MAX_INLINE_RESULT: u32 = 4096;
/// Names that the module of a version and its type parameters use.
const RESERVED_NAMES: [&str; 12] =
    ["Binding", "Bindings", "Client", "Err", "F", "Ok", "Refusal", "Result", "S", "Server", "Signature", "T"];

/// Methods of the prelude's traits that would take precedence over methods of a client.
const PRELUDE_METHODS: [&str; 4] = ["clone", "into", "to_owned", "try_into"];

/// Generates a module for each version of each program.
pub(super) fn programs(model: &Model, schema: &Schema, engine: &TokenStream) -> Vec<TokenStream> {
    let versions =
        || schema.programs.iter().flat_map(|program| program.versions.iter().map(move |version| (program, version)));
    // A module must not hide a crate that the code names.
    let crates = ["core", "rpcrdma", "rpcrdma_xdr", "std"];
    let mut scope = Scope::with(&crates);
    let module = |(program, version): (&Program, &Version)| {
        let count = versions().filter(|(_, other)| other.name.text == version.name.text).count();
        let name = match count {
            1 => scope.snake(&version.name.text),
            _ => scope.snake(&format!("{}_{}", program.name.text, version.name.text)),
        };
        let documented = if version.name.doc.is_empty() { &program.name } else { &version.name };
        let doc = docs(documented, &format!("{}.{}", program.name.text, version.name.text));
        let body = Module::new(model, engine, program, version).code();
        quote!(#doc pub mod #name { #body })
    };
    versions().map(module).collect()
}

/// Names and types of one procedure.
struct Call<'s> {
    procedure: &'s Procedure,
    doc: TokenStream,
    /// Name of the signature's type.
    signature: Ident,
    /// Name of the method.
    method: Ident,
    /// Name of the client's method with call options.
    with_options: Ident,
    /// Name of the procedure, without the common prefix.
    text: &'s str,
    /// Type of the arguments, unless there are none.
    args: Option<TokenStream>,
}

/// The module of a version.
struct Module<'s> {
    model: &'s Model,
    engine: &'s TokenStream,
    program: u32,
    version: u32,
    /// Procedures without the null procedure, which the engine answers.
    calls: Vec<Call<'s>>,
}

impl<'s> Module<'s> {
    fn new(model: &'s Model, engine: &'s TokenStream, program: &Program, version: &'s Version) -> Self {
        let names: Vec<_> = version.procedures.iter().map(|procedure| &*procedure.name.text).collect();
        let prefix = common_prefix(&names);
        let (mut types, mut methods) = (Scope::with(&RESERVED_NAMES), Scope::with(&PRELUDE_METHODS));
        let calls = version.procedures.iter().filter(|procedure| !is_null(procedure)).map(|procedure| {
            let text = &procedure.name.text[prefix..];
            let (signature, method) = (types.camel(text), methods.snake(text));
            let doc = docs(&procedure.name, &procedure.name.text);
            let args = (!procedure.arguments.is_empty()).then(|| arguments(model, procedure, &quote!('_)));
            let with_options = methods.snake(&format!("{text}_with"));
            Call { procedure, doc, signature, method, with_options, text, args }
        });
        Self { model, engine, program: program.number, version: version.number, calls: calls.collect() }
    }

    fn code(&self) -> TokenStream {
        let signatures = self.calls.iter().map(|call| self.signature(call));
        let [program, version] = [self.program, self.version].map(Literal::u32_unsuffixed);
        let (server, client, engine) = (self.server(), self.client(), self.engine);
        let numbers = quote! {
            /// Number of the program.
            pub const PROGRAM: u32 = #program;
            /// Version of the program.
            pub const VERSION: u32 = #version;
        };
        if self.calls.is_empty() {
            return numbers;
        }
        quote! {
            use #engine::binding::{Binding, Bindings};
            use #engine::typed::{self, Signature};
            use #engine::{Refusal, service};

            #numbers
            #(#signatures)*
            #server
            #client
        }
    }

    fn signature(&self, call: &Call<'_>) -> TokenStream {
        let Call { procedure, doc, signature, text, .. } = call;
        let arguments = arguments(self.model, procedure, &quote!('a));
        let results = self.model.argument(&procedure.results, &quote!('a));
        let Placement { arguments: sent, results: returned, max_inline_result, max_call, max_reply, head, .. } =
            &procedure.placement;
        let eligible = |name: &str, eligible: &Option<Eligible>| {
            let name = format_ident!("{name}");
            eligible.map(|Eligible { count, max_len }| {
                let [count, max_len] = [count, max_len].map(Literal::u32_unsuffixed);
                quote!(.#name(#count, #max_len))
            })
        };
        let (sent, returned_items) = (eligible("arguments", sent), eligible("results", returned));
        let all = returned.map_or(0, |items| items.max_len.saturating_add(3).saturating_mul(items.count));
        let [number, max_call, max_reply, head, max_inline] =
            [procedure.number, *max_call, *max_reply, *head, max_inline_result.unwrap_or(all.min(MAX_INLINE_RESULT))]
                .map(Literal::u32_unsuffixed);
        let one_way = procedure.placement.one_way.then(|| {
            quote!(
                const ONE_WAY: bool = true;
            )
        });
        quote! {
            #doc
            #[derive(Clone, Copy, Debug)]
            pub enum #signature {}

            impl Signature for #signature {
                const PROGRAM: u32 = PROGRAM;
                const VERSION: u32 = VERSION;
                const NUMBER: u32 = #number;
                const NAME: &'static str = #text;
                const BINDING: Binding = Binding::inline(#max_call, #max_reply)#sent #returned_items;
                const HEAD: usize = #head;
                const MAX_INLINE_RESULT: usize = #max_inline;
                #one_way
                type Args<'a> = #arguments;
                type Results<'a> = #results;
            }
        }
    }

    fn server(&self) -> TokenStream {
        let methods = self.calls.iter().map(|call| {
            let Call { doc, signature, method, procedure, args, .. } = call;
            let named = args.iter().map(|_| quote!(args));
            let args = args.iter();
            let refuse = quote!(call.refuse(Refusal::ProcedureUnavailable));
            match procedure.placement.run {
                Run::Shard | Run::Workers => quote! {
                    #doc
                    fn #method(
                        &self,
                        call: typed::CallInfo<'_>,
                        #(args: #args,)*
                        answer: typed::ReplySender<'_, #signature>,
                    ) -> Result<typed::ReplySent, Refusal> {
                        let _ = (call, #(#named,)* answer);
                        Err(Refusal::ProcedureUnavailable)
                    }
                },
                Run::Deferred => quote! {
                    #doc
                    fn #method(&self, call: typed::Deferred<#signature>) {
                        #refuse;
                    }
                },
                Run::Async => quote! {
                    #doc
                    ///
                    /// The future cannot borrow `self`. It must own what it needs, such as a clone of an `Arc`.
                    fn #method(&self, call: typed::Deferred<#signature>) -> impl ::core::future::Future<Output = ()> + 'static {
                        async move { #refuse; }
                    }
                },
            }
        });
        let adds = [self.add(false), self.add(true)];
        let run = self.run_and_defer();
        let bindings = self.calls.iter().map(
            |Call { signature, .. }| quote!(bindings.add(PROGRAM, VERSION, #signature::NUMBER, #signature::BINDING);),
        );
        quote! {
            /// Procedures of a server. A method that it does not implement refuses calls with PROC_UNAVAIL.
            pub trait Server {
                #(#methods)*
            }
            #(#adds)*
            #run
            /// Upper-layer binding of the procedures, for clients.
            #[must_use]
            pub fn bindings() -> Bindings {
                let mut bindings = Bindings::new();
                #(#bindings)*
                bindings
            }
        }
    }

    /// Generates code that adds `procedure` to `services`.
    fn register(Call { signature, procedure, .. }: &Call<'_>, workers: &Option<TokenStream>) -> TokenStream {
        let bound = quote!(typed::bound::<#signature, _>(procedure));
        let bound = if procedure.placement.cached { quote!(cache.on(#bound)) } else { bound };
        quote!(services.add(PROGRAM, VERSION, #signature::NUMBER, #bound #workers);)
    }

    /// The parameter for the cache, if a procedure needs one.
    fn cache<'c>(calls: impl IntoIterator<Item = &'c Call<'c>>) -> Option<TokenStream> {
        calls.into_iter().any(|call| call.procedure.placement.cached).then(|| quote!(, cache: &typed::ProgramCache))
    }

    fn add(&self, is_local: bool) -> TokenStream {
        let Self { engine, calls, .. } = self;
        let (doc, name, services, bounds, shared) = match is_local {
            false => (
                " Adds the program to services of all shards.",
                format_ident!("add"),
                quote!(#engine::Services),
                quote!(::core::marker::Send + ::core::marker::Sync + 'static),
                quote!(::std::sync::Arc),
            ),
            true => (
                " Adds the program to services of one shard, where all procedures run.",
                format_ident!("add_local"),
                quote!(service::LocalServices),
                quote!('static),
                quote!(::std::rc::Rc),
            ),
        };
        let adds = calls.iter().map(|call| {
            let Call { signature, method, procedure, .. } = call;
            let procedures = quote!(#engine::Procedure);
            let pass = |take| quote!(typed::#take(call, |call| Server::#method(&*shared_server, call)));
            let constructor = match procedure.placement.run {
                Run::Shard | Run::Workers => {
                    let invoke = invoke(call, &quote!(&*shared_server));
                    quote!(#procedures::new(move |call| { #invoke }))
                }
                Run::Deferred => {
                    let take = pass(quote!(take::<#signature>));
                    quote!(#procedures::deferred(move |call| { #take }))
                }
                Run::Async => {
                    let begin = pass(quote!(begin::<#signature, _>));
                    quote! {
                        #procedures::asynchronous(move |call| {
                            let shared_server = #shared::clone(&shared_server);
                            async move { #begin.await }
                        })
                    }
                }
            };
            let workers = (procedure.placement.run == Run::Workers && !is_local).then(|| quote!(.on_workers()));
            let register = Self::register(call, &workers);
            quote! {
                let shared_server = #shared::clone(server);
                let procedure = #constructor;
                #register
            }
        });
        let cache = Self::cache(calls);
        quote! {
            #[doc = #doc]
            pub fn #name<S: Server + #bounds>(services: &mut #services, server: &#shared<S> #cache) {
                #(#adds)*
            }
        }
    }

    /// Generates `add_deferred` and `run`, with which threads of the application run procedures.
    fn run_and_defer(&self) -> Option<TokenStream> {
        let engine = self.engine;
        let is_immediate = |call: &&Call<'_>| matches!(call.procedure.placement.run, Run::Shard | Run::Workers);
        let calls: Vec<_> = self.calls.iter().filter(is_immediate).collect();
        let arms = calls.iter().map(|call| {
            let (number, invoke) = (Literal::u32_unsuffixed(call.procedure.number), invoke(call, &quote!(server)));
            quote!(#number => { #invoke })
        });
        let adds = calls.iter().map(|call| {
            let register = Self::register(call, &None);
            quote!(let procedure = #engine::Procedure::deferred(::core::clone::Clone::clone(&submit)); #register)
        });
        let cache = Self::cache(calls.iter().copied());
        (!calls.is_empty()).then(|| {
            quote! {
                /// Adds the procedures that answer by returning, for threads of the application.
                ///
                /// `submit` is called on the shard with each call, and passes it to a thread that answers it with the
                /// outcome of [`run`]. Call [`add`] before, which adds the other procedures.
                pub fn add_deferred<F>(services: &mut #engine::Services, submit: F #cache)
                where
                    F: ::core::ops::Fn(service::DeferredCall)
                        + ::core::clone::Clone + ::core::marker::Send + ::core::marker::Sync + 'static,
                {
                    #(#adds)*
                }

                /// Runs a call of a procedure that answers when it returns, on any thread.
                ///
                /// # Errors
                /// The call is refused.
                pub fn run<S: Server + ?::core::marker::Sized>(
                    server: &S,
                    call: &mut service::ServerCall,
                ) -> Result<(), Refusal> {
                    match call.info().procedure() {
                        #(#arms)*
                        _ => Err(Refusal::ProcedureUnavailable),
                    }
                }
            }
        })
    }

    fn client(&self) -> TokenStream {
        let methods = self.calls.iter().map(|call| {
            let Call { doc, signature, method: name, with_options, args, .. } = call;
            let named = if args.is_some() { quote!(args) } else { quote!(&()) };
            let args: Vec<_> = args.iter().collect();
            let method = |name, note: Option<&str>, parameter, options| {
                let note = note.iter();
                quote! {
                    #doc
                    #(#[doc = ""] #[doc = #note])*
                    ///
                    /// # Errors
                    /// The call failed or was refused, or the reply is invalid.
                    pub fn #name(
                        &mut self, #(args: &#args,)* #parameter
                    ) -> Result<typed::Response<#signature>, typed::Error> {
                        typed::call(&mut self.0, #options, #named)
                    }
                }
            };
            let without_options = method(name, None, quote!(), quote!(typed::CallOptions::new()));
            let note = " The options may have chunk memory and a time-out.";
            let options = quote!(options: typed::CallOptions<#signature>);
            let with_options = method(with_options, Some(note), options, quote!(options));
            quote!(#without_options #with_options)
        });
        let is_conversion = |call: &Call<'_>| {
            let name = call.method.to_string();
            ["as_", "from_", "into_", "is_", "to_"].iter().any(|prefix| name.starts_with(prefix))
        };
        let lint = self.calls.iter().any(is_conversion);
        let lint = lint.then(|| quote!(#[allow(clippy::wrong_self_convention, clippy::allow_attributes)]));
        quote! {
            /// A client that calls the procedures over a connection.
            #[derive(Clone, Copy, Debug)]
            pub struct Client<T>(pub T);

            #lint
            impl<T: typed::Transport> Client<T> {
                #(#methods)*
            }
        }
    }
}

/// Type of the arguments: `()`, the type of one argument, or a tuple.
fn arguments(model: &Model, procedure: &Procedure, life: &TokenStream) -> TokenStream {
    let types: Vec<_> = procedure.arguments.iter().map(|ty| model.argument(ty, life)).collect();
    match &types[..] {
        [one] => one.clone(),
        types => quote!((#(#types),*)),
    }
}

/// Generates code that runs a call of a procedure that answers when it returns.
fn invoke(Call { signature, method, args, .. }: &Call<'_>, server: &TokenStream) -> TokenStream {
    let (pattern, args) = if args.is_some() { (quote!(args), quote!(args,)) } else { (quote!(()), quote!()) };
    quote!(typed::run::<#signature>(call, |call, #pattern, answer| Server::#method(#server, call, #args answer)))
}

/// Whether this is the null procedure.
fn is_null(procedure: &Procedure) -> bool {
    procedure.number == 0 && procedure.arguments.is_empty() && procedure.results == Type::Void
}
