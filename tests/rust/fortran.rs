//! Tests that `include/mpgpu/fortran/c_abi.f90` is the Fortran translation of every constant, struct and function in
//! `include/mpgpu/mpgpu.h`.
//!
//! Rules of the translation: A handle, and a pointer to arbitrary memory (`void *` or a counter), become a `type(c_ptr)`. Any other pointer
//! becomes an argument by reference with `optional`, because Fortran passes NULL for an omitted argument; the library refuses NULL where it
//! is not permitted. Such a pointer becomes an array if the next argument is the number of its elements. `MP_VERSION` becomes
//! `MP_HEADER_VERSION`, because Fortran names are case-insensitive and a function has the same name.

use std::collections::BTreeMap;
use std::path::PathBuf;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// C type of a variable, including pointers, such as `const mp_signal_t *`.
#[derive(Clone, Debug)]
struct CType {
    name: String,
    is_const: bool,
    pointers: usize,
}

#[derive(Clone, Debug)]
struct Variable {
    name: String,
    of: CType,
    /// Number of elements if this is an array in a struct; otherwise `None`.
    elements: Option<usize>,
}

#[derive(Debug)]
struct Function {
    name: String,
    result: CType,
    arguments: Vec<Variable>,
}

#[derive(Default, Debug)]
struct Header {
    constants: Vec<(String, String)>,
    handles: Vec<String>,
    enumerations: Vec<(String, Vec<(String, i64)>)>,
    structs: Vec<(String, Vec<Variable>)>,
    /// Values of the `_INIT` macros, by the name of the struct, without the first value, which is the size.
    initials: BTreeMap<String, Vec<String>>,
    callbacks: Vec<Function>,
    functions: Vec<Function>,
}

/// Returns the words of the header that a C compiler sees, and a list of its `#define`s. Code that only C++ sees is omitted.
fn words(text: &str) -> (Vec<String>, Vec<(String, String)>) {
    let (mut words, mut defines) = (Vec::new(), Vec::new());
    let (mut is_comment, mut is_inline) = (false, false);
    for line in text.lines() {
        let line = line.trim_end();
        is_comment |= line.starts_with("/*");
        is_inline |= line.starts_with("static inline");
        if let Some(define) = line.strip_prefix("#define ") {
            if let Some((name, value)) = define.split_once(' ') {
                defines.push((name.to_owned(), value.to_owned()));
            }
        } else if !is_comment
            && !is_inline
            && !line.starts_with('#')
            && !line.contains("extern \"C\"")
            && !line.contains("mp_enumerations_have")
        {
            let code = line.split("//").next().unwrap_or_default();
            let mut word = String::new();
            for c in code.chars().chain(['\n']) {
                if c.is_alphanumeric() || c == '_' {
                    word.push(c);
                    continue;
                }
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                if !c.is_whitespace() {
                    words.push(c.to_string());
                }
            }
        }
        is_comment &= !line.ends_with("*/");
        is_inline &= line != "}";
    }
    (words, defines)
}

/// Parses the declaration of a variable: `const`, name of the type, asterisks, name of the variable, and size of an array.
fn variable(words: &[String]) -> Variable {
    let (words, elements) = match words {
        [before @ .., open, size, close] if open == "[" && close == "]" => (before, Some(size.parse().expect("a size is a number"))),
        _ => (words, None),
    };
    let (name, of) = words.split_last().expect("a variable has a name");
    Variable { name: name.clone(), of: c_type(of), elements }
}

fn c_type(words: &[String]) -> CType {
    let is = |what: &str| words.iter().filter(|word| *word == what).count();
    let name = words.iter().find(|word| !["const", "struct", "*"].contains(&word.as_str())).expect("a type has a name");
    CType { name: name.clone(), is_const: is("const") > 0, pointers: is("*") }
}

/// Parses the arguments between two parentheses.
fn arguments(words: &[String]) -> Vec<Variable> {
    let is_empty = words.is_empty() || words == ["void"];
    if is_empty { Vec::new() } else { words.split(|word| word == ",").map(variable).collect() }
}

fn parse(text: &str) -> Header {
    let (words, defines) = words(text);
    let initial = |value: &str| {
        let (of, values) = value.strip_prefix("{sizeof(")?.strip_suffix('}')?.split_once("), ")?;
        Some((of.to_owned(), values.split(", ").map(str::to_owned).collect()))
    };
    let initials = defines.iter().filter(|(name, _)| name.ends_with("_INIT")).filter_map(|(_, value)| initial(value)).collect();
    let is_constant = |name: &str| name.starts_with("MP_") && !name.contains('(') && !name.ends_with("_INIT");
    let constants = defines.into_iter().filter(|(name, _)| is_constant(name)).collect();
    let mut header = Header { constants, initials, ..Header::default() };
    let mut rest = words.as_slice();
    while !rest.is_empty() {
        let mut depth = 0;
        let end = rest.iter().position(|word| {
            depth += i32::from(word == "{") - i32::from(word == "}");
            depth == 0 && word == ";"
        });
        let (statement, after) = rest.split_at(end.expect("a statement ends"));
        rest = &after[1..];
        let text: Vec<&str> = statement.iter().map(String::as_str).collect();
        let body = || {
            let open = text.iter().position(|word| *word == "{").expect("it has a body");
            &statement[open + 1..statement.len() - 2]
        };
        match text.as_slice() {
            ["typedef", "struct", _, "*", name] => header.handles.push((*name).to_owned()),
            ["typedef", "enum", .., name] => {
                let values = body().split(|word| word == ",").filter(|value| !value.is_empty());
                let values = values.map(|value| (value[0].clone(), value[2].parse().expect("a value is a number")));
                header.enumerations.push(((*name).to_owned(), values.collect()));
            }
            ["typedef", "struct", "{", .., name] => {
                let fields = body().split(|word| word == ";").filter(|field| !field.is_empty()).map(variable);
                header.structs.push(((*name).to_owned(), fields.collect()));
            }
            ["typedef", ..] => {
                let open = text.iter().position(|word| *word == "(").expect("a function pointer");
                let (name, last) = (statement[open + 2].clone(), statement.len() - 1);
                let result = c_type(&statement[1..open]);
                header.callbacks.push(Function { name, result, arguments: arguments(&statement[open + 5..last]) });
            }
            _ => {
                let open = text.iter().position(|word| *word == "(").expect("a function");
                let (name, result) = statement[..open].split_last().expect("a function has a name");
                let arguments = arguments(&statement[open + 1..statement.len() - 1]);
                header.functions.push(Function { name: name.clone(), result: c_type(result), arguments });
            }
        }
    }
    header
}

impl Header {
    /// Returns the Fortran type for a value of a C type.
    fn value(&self, of: &CType) -> String {
        let named = |name: &str| match name {
            "size_t" => "integer(c_size_t)".to_owned(),
            "uint64_t" | "int64_t" => "integer(c_int64_t)".to_owned(),
            "uint32_t" | "int32_t" => "integer(c_int32_t)".to_owned(),
            "uint8_t" => "integer(c_int8_t)".to_owned(),
            "int" => "integer(c_int)".to_owned(),
            "double" => "real(c_double)".to_owned(),
            "char" => "character(kind=c_char)".to_owned(),
            name if self.handles.iter().any(|handle| handle == name) => "type(c_ptr)".to_owned(),
            name if self.enumerations.iter().any(|(other, _)| other == name) => "integer(c_int)".to_owned(),
            name if self.structs.iter().any(|(other, _)| other == name) => format!("type({name})"),
            name if self.callbacks.iter().any(|other| other.name == name) => "type(c_funptr)".to_owned(),
            name => panic!("{name}: this type has no Fortran form yet"),
        };
        if of.pointers > 0 { "type(c_ptr)".to_owned() } else { named(&of.name) }
    }

    /// Returns the size and the alignment of a C type in bytes on 64-bit systems.
    fn layout(&self, of: &CType) -> (usize, usize) {
        if let Some((_, fields)) = self.structs.iter().find(|(name, _)| of.pointers == 0 && *name == of.name) {
            return self.struct_layout(fields);
        }
        let bytes = match self.value(of).as_str() {
            "integer(c_int8_t)" | "character(kind=c_char)" => 1,
            "integer(c_int)" | "integer(c_int32_t)" => 4,
            _ => 8,
        };
        (bytes, bytes)
    }

    fn struct_layout(&self, fields: &[Variable]) -> (usize, usize) {
        let (mut bytes, mut alignment) = (0_usize, 1);
        for field in fields {
            let (of_field, aligned) = self.layout(&field.of);
            bytes = bytes.next_multiple_of(aligned) + of_field * field.elements.unwrap_or(1);
            alignment = alignment.max(aligned);
        }
        (bytes.next_multiple_of(alignment), alignment)
    }

    /// Translates the value of a constant, which is a C expression in the header.
    fn constant(&self, name: &str, value: &str) -> String {
        let number = |of: &str| {
            let (_, value) = self.constants.iter().find(|(other, _)| other == of).expect("the header has it");
            value.parse::<u32>().expect("it is a number")
        };
        let plain = value.trim_matches(['(', ')']);
        match (name, plain) {
            ("MP_VERSION", _) => {
                let version = number("MP_VERSION_MAJOR") * 10000 + number("MP_VERSION_MINOR") * 100 + number("MP_VERSION_PATCH");
                format!("integer(c_int32_t), parameter :: MP_HEADER_VERSION = {version}")
            }
            (_, "9223372036854775808ull") => format!("integer(c_int64_t), parameter :: {name} = -huge(0_c_int64_t) - 1_c_int64_t"),
            _ => {
                let value = match plain.strip_prefix("0x") {
                    // The value is the signed number with the same bits, because Fortran has no unsigned integers.
                    Some(digits) => u32::from_str_radix(digits, 16).expect("it has 32 bits").cast_signed(),
                    None => plain.parse().unwrap_or_else(|_| panic!("{name}: {value} has no Fortran form yet")),
                };
                format!("integer(c_int32_t), parameter :: {name} = {value}")
            }
        }
    }

    fn argument(&self, argument: &Variable, next: Option<&Variable>) -> String {
        let (name, of) = (&argument.name, &argument.of);
        let by_address = of.pointers > 0 && (name == "counter" || (of.name == "void" && of.pointers == 1));
        if of.pointers == 0 || by_address {
            return format!("{}, value :: {name}", self.value(of));
        }
        let pointee =
            if of.name == "void" { "type(c_ptr)".to_owned() } else { self.value(&CType { pointers: of.pointers - 1, ..of.clone() }) };
        let has_size = next.is_some_and(|next| next.of.pointers == 0 && (next.name == "capacity" || next.name.ends_with("count")));
        let dimension = if of.name == "char" || of.name == "uint8_t" || has_size { "(*)" } else { "" };
        let intent = if of.is_const { "in" } else { "inout" };
        format!("{pointee}, intent({intent}), optional :: {name}{dimension}")
    }

    fn procedure(&self, function: &Function, is_abstract: bool) -> String {
        let names: Vec<&str> = function.arguments.iter().map(|argument| argument.name.as_str()).collect();
        let is_subroutine = function.result.name == "void" && function.result.pointers == 0;
        let (kind, result) = if is_subroutine { ("subroutine", "") } else { ("function", " result(outcome)") };
        let binding = if is_abstract { "bind(c)".to_owned() } else { format!("bind(c, name=\"{}\")", function.name) };
        let mut text = wrapped(&format!("        {kind} {}({}) {binding}{result}", function.name, names.join(", ")));
        text += "            import\n";
        for (index, argument) in function.arguments.iter().enumerate() {
            let declared = if is_abstract && argument.of.pointers > 0 {
                // The argument is a C pointer, because a callback may receive NULL or an array.
                format!("type(c_ptr), value :: {}", argument.name)
            } else if is_abstract {
                format!("{}, value :: {}", self.value(&argument.of), argument.name)
            } else {
                self.argument(argument, function.arguments.get(index + 1))
            };
            text += &format!("            {declared}\n");
        }
        if !is_subroutine {
            text += &format!("            {} :: outcome\n", self.value(&function.result));
        }
        text + &format!("        end {kind} {}\n", function.name)
    }

    fn fortran(&self) -> String {
        let mut text = String::from(
            "! SPDX-License-Identifier: MIT OR Apache-2.0\n\
             !\n\
             ! Fortran interface to mpgpu/mpgpu.h: every constant, struct and function of the C ABI, under the same names. The header\n\
             ! documents them. Most programs need only module mpgpu, whose procedures report errors in the way of Fortran.\n\
             !\n\
             ! Handles and untyped pointers have the type c_ptr. Any other pointer is an argument by reference; if it is omitted,\n\
             ! NULL is passed. Enumerations have the type integer(c_int). Unsigned numbers become signed numbers with the same bits.\n\
             ! Variables of structure types initially have the values of the _INIT macros.\n\
             !\n\
             ! Generated from mpgpu.h: UPDATE_HEADER=1 cargo test --test library fortran. Change that, not this file.\n\
             module mpgpu_c\n    \
                 use, intrinsic :: iso_c_binding\n    \
                 implicit none\n    \
                 public\n\n",
        );
        for (name, value) in &self.constants {
            text += &format!("    {}\n", self.constant(name, value));
        }
        for (name, values) in &self.enumerations {
            text += &format!("\n    ! {name}\n");
            for (value, number) in values {
                text += &format!("    integer(c_int), parameter :: {value} = {number}\n");
            }
        }
        for (name, fields) in &self.structs {
            text += &format!("\n    type, bind(c) :: {name}\n");
            for (index, field) in fields.iter().enumerate() {
                let of = self.value(&field.of);
                // Constants in the macros, such as `MP_DEFAULT`, are 0.
                let given = self.initials.get(name).and_then(|values| values.get(index.checked_sub(1)?));
                let number = given.filter(|value| value.parse::<u64>().is_ok()).map_or("0", String::as_str);
                let initial = match of.as_str() {
                    "integer(c_size_t)" if field.name == "size" => format!("{}_c_size_t", self.struct_layout(fields).0),
                    "type(c_ptr)" => "c_null_ptr".to_owned(),
                    "type(c_funptr)" => "c_null_funptr".to_owned(),
                    "real(c_double)" => "0.0_c_double".to_owned(),
                    of => match of.strip_prefix("type(") {
                        Some(of) => format!("{}()", of.trim_end_matches(')')),
                        None => format!("{number}_{}", of.trim_start_matches("integer(").trim_end_matches(')')),
                    },
                };
                let dimension = field.elements.map(|elements| format!("({elements})")).unwrap_or_default();
                text += &format!("        {of} :: {}{dimension} = {initial}\n", field.name);
            }
            text += &format!("    end type {name}\n");
        }
        text += "\n    abstract interface\n";
        text += &self.callbacks.iter().map(|callback| self.procedure(callback, true)).collect::<Vec<_>>().join("\n");
        text += "    end interface\n\n    interface\n";
        text += &self.functions.iter().map(|function| self.procedure(function, false)).collect::<Vec<_>>().join("\n");
        text + "    end interface\nend module mpgpu_c\n"
    }
}

/// Breaks a statement into lines of at most 132 characters, the limit of Fortran.
fn wrapped(statement: &str) -> String {
    let (mut lines, mut line) = (String::new(), String::new());
    for word in statement.split_inclusive(' ') {
        if line.len() + word.len() > 120 && !line.trim().is_empty() {
            lines += &format!("{}&\n", line);
            line = " ".repeat(16);
        }
        line += word;
    }
    lines + line.trim_end() + "\n"
}

#[test]
fn the_fortran_module_says_what_the_header_says() {
    let header = std::fs::read_to_string(root().join("include/mpgpu/mpgpu.h")).expect("the header is there");
    let generated = parse(&header).fortran();
    let page = root().join("include/mpgpu/fortran/c_abi.f90");
    if std::env::var_os("UPDATE_HEADER").is_some() {
        std::fs::write(&page, &generated).expect("the module can be written");
    }
    let checked_in = std::fs::read_to_string(&page).expect("the module is there");
    assert!(
        checked_in == generated,
        "include/mpgpu/fortran/c_abi.f90 differs from what mpgpu.h says; run UPDATE_HEADER=1 cargo test --test library fortran"
    );
}

#[test]
fn every_function_and_every_constant_of_the_header_is_found() {
    let text = std::fs::read_to_string(root().join("include/mpgpu/mpgpu.h")).expect("the header is there");
    let header = parse(&text);
    // Functions are counted in a second way: each starts a line with its result type, followed by its name.
    let starts = |line: &&str| ["mp_status_t mp_", "uint32_t mp_", "const char *mp_"].iter().any(|start| line.starts_with(start));
    assert_eq!(header.functions.len(), text.lines().filter(starts).count());
    let values: BTreeMap<&str, i64> =
        header.enumerations.iter().flat_map(|(_, values)| values).map(|(name, value)| (name.as_str(), *value)).collect();
    assert_eq!(values["MP_ERROR_QUEUE_FULL"], 22);
    assert_eq!(values["MP_BACKEND_CUDA"], 2);
    let transfer = header.structs.iter().find(|(name, _)| name == "mp_transfer_t").expect("it is a struct");
    assert_eq!(header.struct_layout(&transfer.1), (40, 8));
    assert_eq!(header.initials["mp_blocks_t"][11..], ["8", "0"]);
}

#[test]
fn a_function_has_the_arguments_that_c_gives_it() {
    let header = parse(
        "typedef struct mp_context *mp_context_t;\ntypedef struct {\n    uint64_t *counter;\n    uint64_t value;\n} mp_signal_t;\n\
         mp_status_t mp_x(mp_context_t context, void **memory, const mp_signal_t *signals,\n    size_t count, double seconds);\n\
         typedef enum { MP_SUCCESS = 0, } mp_status_t;\n",
    );
    let text = header.procedure(&header.functions[0], false);
    let declared: Vec<&str> = text.lines().map(str::trim).collect();
    let wanted = [
        "function mp_x(context, memory, signals, count, seconds) bind(c, name=\"mp_x\") result(outcome)",
        "import",
        "type(c_ptr), value :: context",
        "type(c_ptr), intent(inout), optional :: memory",
        "type(mp_signal_t), intent(in), optional :: signals(*)",
        "integer(c_size_t), value :: count",
        "real(c_double), value :: seconds",
        "integer(c_int) :: outcome",
        "end function mp_x",
    ];
    assert_eq!(declared, wanted);
}
