package inboxsql

import (
	"database/sql/driver"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// SchemaAdapter produces the SQL text for one database. It runs nothing: the order of the statements,
// and all decisions, are the [Repository]'s. A new database is one such adapter and its schema files.
//
// Its methods may be called by many goroutines at once.
type SchemaAdapter interface {
	// ClaimQuery inserts the key and affects one row, or, by a conflict clause that names the key's
	// columns, none when there is a record already.
	ClaimQuery(params KeyParams) Query

	// RecordQuery selects the key's record: processed_at as microseconds since 1970, and produced, which
	// is NULL when the messages are known to be sent.
	RecordQuery(params KeyParams) Query

	// StoreQuery sets produced in the key's record and returns its processed_at as microseconds since 1970.
	StoreQuery(params StoreParams) Query

	// MarkOpenQuery and ProveOpenQuery are for drivers that commit without saying that the transaction
	// had ended before: the first runs before the claim, in one message with it when neither has arguments;
	// the second runs before the commit and must fail unless that transaction is still open. Empty text:
	// not needed.
	MarkOpenQuery(params ProofParams) Query
	ProveOpenQuery(params ProofParams) Query

	// MarkSentQuery sets dispatched_at and clears produced in the records that have stored messages and the given
	// processed_at. The records are sorted, so that statements lock in one order.
	MarkSentQuery(params MarkSentParams) Query

	// ConsumersQuery selects consumer and the database's time as microseconds since 1970: a row for each consumer
	// that has records, in order, and one with an empty name. It does not read the whole table.
	ConsumersQuery(params CheckParams) Query

	// CleanerLockQuery selects 1 when this transaction holds the lock of the table's cleaners until its end, and
	// 0 at once when another one does. Empty text: not needed.
	CleanerLockQuery(params CheckParams) Query

	// DeleteProcessedQuery deletes as inbox.Records.DeleteProcessed says, and returns processed_at of each record
	// that it deletes as microseconds since 1970.
	DeleteProcessedQuery(params DeleteProcessedParams) Query

	// CountQuery selects the number of the records of a selection.
	CountQuery(params CountParams) Query

	// FindQuery selects consumer, message_id, processed_at as microseconds since 1970, and produced, which is NULL
	// when the messages are known to be sent, as inbox.Records.FindRecords says.
	FindQuery(params FindParams) Query

	// DeleteRecordsQuery deletes the records whose keys and processed_at are those of the found ones. Statements
	// lock in the order of the keys.
	DeleteRecordsQuery(params DeleteRecordsParams) Query

	// StatisticsQuery selects consumer, the number of records, how many of them are unsent, processed_at of the
	// first and the last one as microseconds since 1970, how many were claimed in the last 24 hours, and 0: a row
	// for each consumer, in order. One more row, with an empty name, has the table's size in bytes at the end.
	StatisticsQuery(params CheckParams) Query

	// CheckQuery selects one text per fault that would make the inbox unsafe or unusable; no row when
	// all is well. See [Repository.Check] for what it looks at.
	CheckQuery(params CheckParams) Query

	// SchemaInitializingQueries create what is missing. They run in one transaction and must be safe
	// when many instances run them at once.
	SchemaInitializingQueries(params SchemaInitializingQueriesParams) []Query

	// IsBrokenByHandler reports whether COMMIT was refused for what the handler did in the transaction, by
	// the error's code. False in doubt.
	IsBrokenByHandler(err error) bool

	// IsTransactionOver reports whether StoreQuery or ProveOpenQuery failed because the transaction has
	// failed or ended before, by the error's code. False in doubt.
	IsTransactionOver(err error) bool

	// SchemaQuery selects the name of the schema in which a table that was named without one is found; no
	// row when there is none. Empty text: names are not searched for. The repository asks once and uses
	// the full name from then on, whatever handlers do to the search path.
	SchemaQuery(params CheckParams) Query
}

// KeyChecker is an optional ability of a [SchemaAdapter]: it does not take every key.
type KeyChecker interface {
	// CheckKey runs before any SQL is sent. Its error is the claim's, and matches inbox.ErrInvalidKey for what no
	// retry mends.
	CheckKey(key inbox.Key) error
}

// ClaimExplainer is an optional ability of a [SchemaAdapter]: it knows more about why a claim failed.
type ClaimExplainer interface {
	// ExplainClaim returns the error to give in place of the claim's, which it wraps, or the same error. The
	// transaction has been rolled back. The function runs a query on the pool and returns its single column,
	// of type text.
	ExplainClaim(params KeyParams, err error, query func(Query) ([]string, error)) error
}

// Query is a statement and its arguments.
type Query struct {
	Query string
	Args  []any
}

// KeyParams are the parameters of queries for one record.
type KeyParams struct {
	Table Table
	Key   inbox.Key // valid
}

// StoreParams are the parameters of StoreQuery.
type StoreParams struct {
	KeyParams
	Produced []byte
}

// ProofParams are the parameters of MarkOpenQuery and ProveOpenQuery.
type ProofParams struct {
	KeyParams
	Driver driver.Driver // of the *sql.DB
}

// MarkSentParams are the parameters of MarkSentQuery.
type MarkSentParams struct {
	Table   Table
	Records []inbox.Found // at least one
}

// DeleteProcessedParams are the parameters of DeleteProcessedQuery.
type DeleteProcessedParams struct {
	Table        Table
	Consumer     string
	From, Before time.Time
	Limit        int
}

// CountParams are the parameters of CountQuery.
type CountParams struct {
	Table     Table
	Selection inbox.Selection
}

// FindParams are the parameters of FindQuery.
type FindParams struct {
	Table     Table
	Selection inbox.Selection
	After     inbox.Key // the zero key, or a valid one
	Limit     int
}

// DeleteRecordsParams are the parameters of DeleteRecordsQuery.
type DeleteRecordsParams struct {
	Table Table
	Found []inbox.Found // at least one
}

// CheckParams are the parameters of queries about the whole table.
type CheckParams struct {
	Table Table
}

// SchemaInitializingQueriesParams are the parameters of SchemaInitializingQueries.
type SchemaInitializingQueriesParams struct {
	Table Table
}
