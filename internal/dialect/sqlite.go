package dialect

import (
	"bytes"
	"strings"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/sqliteerr"
)

// SQLite is the [Dialect] of SQLite 3.35 and later.
type SQLite struct{}

var (
	_ Dialect      = SQLite{}
	_ WriteChecker = SQLite{}
)

// Claim implements [Dialect].
func (SQLite) Claim(table Table, key inbox.Key) Query {
	return Query{`INSERT INTO ` + table.Quoted() + ` ("consumer", "message_id") VALUES (?, ?) ` +
		`ON CONFLICT ("consumer", "message_id") DO NOTHING`, keyArgs(key)}
}

// Proof implements [Dialect], by a savepoint. SQLite rolls a transaction back by itself on some errors (disk full, ON
// CONFLICT ROLLBACK); what the handler writes after that is committed statement by statement. The savepoint is gone
// then.
func (SQLite) Proof() (begin, end Query) {
	return Query{Text: `SAVEPOINT "watermill_inbox"`}, Query{Text: `RELEASE "watermill_inbox"`}
}

// Record implements [Dialect].
func (SQLite) Record(table Table, key inbox.Key) Query {
	return Query{`SELECT record."processed_at" * 1000, coalesce(unsent."topic", ''), unsent."produced" FROM ` + sqliteRecords(table) +
		` WHERE record."consumer" COLLATE BINARY = ? AND record."message_id" COLLATE BINARY = ?`, keyArgs(key)}
}

func sqliteRecords(table Table) string {
	return table.Quoted() + ` AS record LEFT JOIN ` + table.Unsent().Quoted() + ` AS unsent ON unsent.` + sqliteConsumer + ` = record."consumer" ` +
		`AND unsent.` + sqliteMessageID + ` = record."message_id" AND unsent."claimed_at" = record."processed_at"`
}

// DecodeProduced implements [Dialect].
func (SQLite) DecodeProduced(value any) ([]byte, error) {
	stored, _ := value.([]byte)
	return bytes.Clone(stored), nil
}

// Store implements [Dialect].
func (SQLite) Store(table Table, key inbox.Key, params inbox.StoreParams, _ bool) Query {
	return Query{`INSERT INTO ` + table.Unsent().Quoted() + ` ("consumer", "message_id", "claimed_at", "topic", "produced") ` +
		`SELECT "consumer", "message_id", "processed_at", ?, ? FROM ` + table.Quoted() + sqliteWhereKey + ` RETURNING "claimed_at" * 1000`,
		append([]any{params.Topic, params.Produced}, keyArgs(key)...)}
}

// MarkSent implements [Dialect]. No row is locked alone, so none is selected.
func (s SQLite) MarkSent(table Table, records []inbox.Record) Query {
	return s.DeleteUnsent(table, records)
}

// sqliteFound names the records as they were found, for sqliteChosen.
func sqliteFound(records []inbox.Record) (with string, args []any) {
	for _, f := range records {
		args = append(args, f.Key.Consumer, f.Key.MessageID, f.ProcessedAt.UnixMilli())
	}
	values := strings.TrimSuffix(strings.Repeat("(?, ?, ?), ", len(records)), ", ")
	return `WITH chosen ("consumer", "message_id", "at") AS (VALUES ` + values + `)`, args
}

// Check implements [Dialect].
func (SQLite) Check(table Table) Query {
	schema := table.Schema()
	if schema == "" {
		schema = "main"
	}
	// Both names are identifiers, see ParseTable.
	return Query{Text: strings.NewReplacer("$table", table.Name(), "$unsent", table.Unsent().Name(), "$schema", schema).Replace(sqliteCheck)}
}

// Advice implements [Dialect].
func (SQLite) Advice(table Table) Query {
	schema := table.Schema()
	if schema == "" {
		schema = "main"
	}
	// Both names are identifiers, see ParseTable.
	return Query{Text: strings.NewReplacer("$table", table.Name(), "$schema", schema).Replace(
		`SELECT ` + Literal(sqliteNoIndex) + ` WHERE NOT EXISTS (SELECT 1 FROM pragma_index_list('$table', '$schema') AS i WHERE i.partial = 0 AND ` +
			`(SELECT group_concat(name) FROM (SELECT name FROM pragma_index_xinfo(i.name, '$schema') WHERE seqno < 2 ORDER BY seqno)) = 'consumer,processed_at')`)}
}

const sqliteNoIndex = `no index begins with (consumer, processed_at), so each batch reads the whole table: apply the CREATE INDEX of schema file 001_inbox.sql`

// Schema implements [Dialect].
func (SQLite) Schema(table Table) []Query {
	// CREATE INDEX names the schema at the index, not at the table.
	index := Table{schema: table.Schema(), name: table.Name() + indexSuffix}
	return schemaQueries("sqlite", strings.NewReplacer(
		`"`+defaultTable+unsentSuffix+`"`, table.Unsent().Quoted(),
		defaultIndex+` ON "`+defaultTable+`"`, index.Quoted()+` ON "`+table.Name()+`"`,
		`"`+defaultTable+`"`, table.Quoted(),
	))
}

// IsBrokenByHandler implements [Dialect], for drivers whose codes are known: there is no active transaction, or a deferred
// foreign key is violated.
func (SQLite) IsBrokenByHandler(err error) bool {
	code, _ := sqliteerr.Code(err)
	return code == sqliteerr.Error || code == sqliteerr.Constraint
}

// IsDenied implements [Dialect]: there are no roles.
func (SQLite) IsDenied(error) bool { return false }

// IsTransactionOver implements [Dialect]: there is no such savepoint, or no transaction. Drivers whose codes are not known
// are believed to mean that.
func (SQLite) IsTransactionOver(err error) bool {
	code, ok := sqliteerr.Code(err)
	return !ok || code == sqliteerr.Error
}

// IsTransactionFailed implements [Dialect]: after an error SQLite is in the transaction that it says.
func (SQLite) IsTransactionFailed(error) bool { return false }

// CheckWrite implements [WriteChecker]: no PRAGMA knows that a file was opened read-only.
func (SQLite) CheckWrite(table Table) Query {
	return Query{Text: `DELETE FROM ` + table.Quoted() + ` WHERE 0`}
}

// IsReadOnly implements [WriteChecker].
func (SQLite) IsReadOnly(err error) bool {
	code, _ := sqliteerr.Code(err)
	return code == sqliteerr.ReadOnly
}

// IsTimeout implements [Dialect]: a smaller batch waits for the writer's lock as long.
func (SQLite) IsTimeout(error) bool { return false }

// Locate implements [Dialect].
func (SQLite) Locate(Table) Query { return Query{} }

// SchemaLock implements [Dialect]: there is one writer anyway.
func (SQLite) SchemaLock() Query { return Query{} }

// sqliteNow is the schema's default of processed_at.
const sqliteNow = `CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)`

// These compare bytes whatever the columns' collation is, as the key that Check demands does.
const (
	sqliteConsumer  = `"consumer" COLLATE BINARY`
	sqliteMessageID = `"message_id" COLLATE BINARY`
	sqliteKey       = sqliteConsumer + `, ` + sqliteMessageID
	sqliteChosen    = `("consumer", "message_id") IN (SELECT "consumer", "message_id" FROM chosen) AND (` + sqliteKey + `, ` // the first by the index; then processed_at or claimed_at and sqliteEnd
	sqliteEnd       = `) IN (SELECT * FROM chosen)`
	sqliteWhereKey  = ` WHERE ` + sqliteConsumer + ` = ? AND ` + sqliteMessageID + ` = ?`
)

func keyArgs(key inbox.Key) []any { return []any{key.Consumer, key.MessageID} }

const sqliteCheck = `
WITH attribute AS (
	SELECT name, upper(type) AS type, dflt_value FROM pragma_table_info('$table', '$schema')
), key AS (
	SELECT * FROM attribute WHERE name IN ('consumer', 'message_id')
)
SELECT 'the connection is read-only (PRAGMA query_only)'
FROM pragma_query_only WHERE query_only <> 0
UNION ALL
SELECT 'journal_mode is off: nothing can be rolled back'
FROM pragma_journal_mode WHERE journal_mode = 'off'
UNION ALL
SELECT 'the table is temporary: other connections would not see what was processed'
WHERE lower('$schema') = 'temp'
UNION ALL
SELECT 'the table does not exist: apply schema file 001_inbox.sql'
WHERE NOT EXISTS (SELECT 1 FROM attribute)
UNION ALL
SELECT 'column ' || need.column1 || ' is missing: apply schema file 001_inbox.sql'
FROM (VALUES ('consumer'), ('message_id'), ('processed_at')) AS need
WHERE EXISTS (SELECT 1 FROM attribute) AND need.column1 NOT IN (SELECT name FROM attribute)
UNION ALL
SELECT 'column ' || name || ' has type ' || type || ', which changes what it stores; it must be TEXT'
FROM key
WHERE type LIKE '%INT%' OR NOT (type LIKE '%CHAR%' OR type LIKE '%CLOB%' OR type LIKE '%TEXT%')
UNION ALL
SELECT 'column processed_at has no default'
FROM attribute WHERE name = 'processed_at' AND dflt_value IS NULL
UNION ALL
SELECT 'index ' || i.name || ' is unique on less than the key, so it would refuse or replace other messages'
FROM pragma_index_list('$table', '$schema') AS i
WHERE i."unique" = 1 AND (SELECT count(*) FROM pragma_index_xinfo(i.name, '$schema') WHERE "key" = 1 AND name IN ('consumer', 'message_id')) < 2
UNION ALL
SELECT 'no primary key or unique index on exactly (consumer, message_id) that is not partial and compares bytes'
WHERE EXISTS (SELECT 1 FROM attribute) AND NOT EXISTS (
	SELECT 1 FROM pragma_index_list('$table', '$schema') AS i
	WHERE i."unique" = 1 AND i.partial = 0
		AND (SELECT count(*) FROM pragma_index_xinfo(i.name, '$schema') WHERE "key" = 1) = 2
		AND (SELECT count(*) FROM pragma_index_xinfo(i.name, '$schema')
			WHERE "key" = 1 AND name IN ('consumer', 'message_id') AND coll = 'BINARY') = 2
)
UNION ALL
SELECT 'the table has the trigger ' || name || ', which could let a claim take no effect'
FROM "$schema".sqlite_master WHERE type = 'trigger' AND lower(tbl_name) = lower('$table')
UNION ALL
SELECT 'column ' || need.column1 || ' of the table of unsent messages is missing: apply schema file 001_inbox.sql'
FROM (VALUES ('consumer'), ('message_id'), ('claimed_at'), ('stored_at'), ('leased_until'), ('topic'), ('produced')) AS need
WHERE EXISTS (SELECT 1 FROM attribute) AND need.column1 NOT IN (SELECT name FROM pragma_table_info('$unsent', '$schema'))
UNION ALL
SELECT 'the table of unsent messages has no primary key on (consumer, message_id, claimed_at)'
WHERE EXISTS (SELECT 1 FROM pragma_table_info('$unsent', '$schema'))
	AND (SELECT group_concat(name) FROM (SELECT name FROM pragma_table_info('$unsent', '$schema') WHERE pk > 0 ORDER BY pk))
		IS NOT 'consumer,message_id,claimed_at'`
