// Package dialect has the SQL text of each database, and what its errors mean. It runs nothing: the order of the
// statements is internal/engine's, and how they reach a server is a driver's executor's. A new database is one
// [Dialect] and its schema files.
package dialect

import (
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// Dialect is one database. Its methods may be called by many goroutines at once. Keys are valid, and times are
// selected as microseconds since 1970.
type Dialect interface {
	// Claim inserts the key and affects one row, or, by a conflict clause that names the key's columns, none when
	// there is a record already.
	Claim(table Table, key inbox.Key) Query

	// Proof are two statements that prove a transaction to be the one in which a message was claimed: the first runs
	// before the claim, and the second fails unless that transaction is still open.
	Proof() (begin, end Query)

	// Record selects processed_at, topic and produced of the key's record.
	Record(table Table, key inbox.Key) Query

	// DecodeProduced returns the bytes that a query has selected as produced, of which the driver has made a text or
	// bytes of its own; nil when there were none.
	DecodeProduced(value any) ([]byte, error)

	// Store stores the messages under the key of a record and returns its processed_at; no row if there is no record.
	// Through a driver with free parameters one travels with the statement in one round trip.
	Store(table Table, key inbox.Key, params inbox.StoreParams, freeParameters bool) Query

	// MarkSent deletes the messages stored with these records, at least one, but for those that are locked, and
	// selects consumer, message_id and claimed_at of the locked ones. Statements lock in the order of the keys.
	MarkSent(table Table, records []inbox.Record) Query

	// Consumers selects consumer and the database's time: a row for each consumer that has records or
	// unsent messages, in order, and one with an empty name. It does not read the whole table.
	Consumers(table Table) Query

	// CleanerLock selects 1 when this transaction holds the lock of the table's cleaners until its end, and 0 at
	// once when another one does. Empty text: not needed.
	CleanerLock(table Table) Query

	// DeleteProcessed deletes as inbox.Records says, and returns processed_at of each record that it deletes.
	DeleteProcessed(table Table, params inbox.DeleteProcessedParams) Query

	// Undeleted selects how many records are left, or whether there are any, that DeleteProcessed should have deleted
	// before in this transaction and that nobody has locked. Empty text: there are none.
	Undeleted(table Table, params inbox.DeleteProcessedParams) Query

	// Count selects the number of the records of a selection.
	Count(table Table, selection inbox.Selection) Query

	// Find selects consumer, message_id, processed_at, topic and produced, as inbox.Records says.
	Find(table Table, selection inbox.Selection, after inbox.Record, limit int) Query

	// LeaseUnsent leases as inbox.Records says, and selects what Find does, in any order.
	LeaseUnsent(table Table, selection inbox.Selection, after inbox.Record, limit int, lease time.Duration) Query

	// DeleteRecords deletes the records, at least one, whose keys and processed_at are those of the found ones.
	// DeleteUnsent deletes the messages stored with such records. Statements lock in the order of the keys.
	DeleteRecords(table Table, found []inbox.Record) Query
	DeleteUnsent(table Table, found []inbox.Record) Query

	// Statistics selects consumer, the number of records, how many of them are unsent, processed_at of the first
	// and the last one, how many were claimed in the last 24 hours, and 0: a row for each consumer, in order. One
	// more row, with an empty name, has the table's size in bytes at the end.
	Statistics(table Table) Query

	// Check selects one text per fault that would make the inbox unsafe or unusable; no row when all is well.
	Check(table Table) Query

	// Advice selects one text per index that the cleaner misses; no row when all is well. No claim needs it.
	Advice(table Table) Query

	// Locate selects the schemas in which a table that was named without one is found, the one that counts first,
	// and 1 if the role may use it, else 0; no row when there is none. Empty text: names are not searched for.
	Locate(table Table) Query

	// SchemaLock lets one transaction at a time create the schema. Empty text: not needed.
	SchemaLock() Query

	// Schema are the statements that create what is missing.
	Schema(table Table) []Query

	// IsBrokenByHandler reports whether COMMIT was refused for what the handler did in the transaction, by the
	// error's code. False in doubt.
	IsBrokenByHandler(err error) bool

	// IsDenied reports whether a statement failed because the role lacks a privilege.
	IsDenied(err error) bool

	// IsTransactionOver reports whether a statement of ours failed because the transaction has failed or ended
	// before, by the error's code. False in doubt.
	IsTransactionOver(err error) bool

	// IsTimeout reports whether the server ended a statement because it took longer, or waited longer for a lock, than
	// the session may, by the error's code. False in doubt. Also true when the caller's context has ended.
	IsTimeout(err error) bool

	// IsTransactionFailed reports whether it failed because of an earlier statement's error, after which it is not known
	// which transaction this is.
	IsTransactionFailed(err error) bool
}

// BeginClaimer is a [Dialect] for which a driver can send the claim in one message with BEGIN.
type BeginClaimer interface {
	// BeginClaim is Claim, but fails on a connection that was already in a transaction.
	BeginClaim(table Table, key inbox.Key) Query
}

// KeyChecker is a [Dialect] that does not take every key.
type KeyChecker interface {
	// CheckKey runs before any SQL is sent. Its error is the claim's, and matches inbox.ErrInvalidKey for what no
	// retry cures.
	CheckKey(key inbox.Key) error
}

// ClaimExplainer is a [Dialect] that knows more about why a claim failed.
type ClaimExplainer interface {
	// ExplainClaim returns the error to give in place of the claim's, which it wraps, or the same error. The
	// transaction has been rolled back. The function runs a query on the pool and returns its single column,
	// of type text.
	ExplainClaim(table Table, key inbox.Key, err error, texts func(Query) ([]string, error)) error
}

// WriteChecker is a [Dialect] that only a write tells whether it can write.
type WriteChecker interface {
	// CheckWrite writes nothing, but needs the lock for it.
	CheckWrite(table Table) Query

	// IsReadOnly reports whether CheckWrite's error says that nothing can be written.
	IsReadOnly(err error) bool
}

// Query is a statement and its arguments.
type Query struct {
	Text string
	Args []any
}
