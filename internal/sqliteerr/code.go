// Package sqliteerr reads result codes from the errors of SQLite's drivers, and links none of them.
package sqliteerr

import "reflect"

// Primary result codes, https://sqlite.org/rescode.html.
const (
	Error      = 1 // for example: no transaction is active
	Busy       = 5
	Locked     = 6
	ReadOnly   = 8
	IOErr      = 10
	Full       = 13
	Constraint = 19
)

// Code returns the primary result code of an error of modernc.org/sqlite or github.com/mattn/go-sqlite3. Other errors have
// codes too, which mean something else, so a code counts by the type that it comes with.
func Code(err error) (code int, ok bool) {
	if err == nil {
		return 0, false
	}
	value := reflect.Indirect(reflect.ValueOf(err))
	if value.Kind() == reflect.Struct && value.Type().Name() == "Error" {
		switch value.Type().PkgPath() {
		case "modernc.org/sqlite":
			if coded, is := err.(interface{ Code() int }); is {
				return coded.Code() & 0xff, true
			}
		case "github.com/mattn/go-sqlite3":
			if field := value.FieldByName("Code"); field.CanInt() {
				return int(field.Int()) & 0xff, true
			}
		}
	}
	switch wrapping := err.(type) {
	case interface{ Unwrap() error }:
		return Code(wrapping.Unwrap())
	case interface{ Unwrap() []error }:
		for _, wrapped := range wrapping.Unwrap() {
			if code, ok := Code(wrapped); ok {
				return code, true
			}
		}
	}
	return 0, false
}
