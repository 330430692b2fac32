package inboxsql

import (
	"errors"
	"strings"

	inbox "github.com/devmappa/watermill-inbox"
)

// DefaultSQLiteSchema is the [SchemaAdapter] for SQLite 3.35 and later, with any driver.
//
// SQLite has one writer at a time: the claim, as the transaction's first statement, takes the write lock,
// and other messages wait for it within the connection's busy timeout. Set one in the DSN (with
// modernc.org/sqlite: _pragma=busy_timeout(5000)), and the WAL journal mode.
type DefaultSQLiteSchema struct{}

var _ SchemaAdapter = DefaultSQLiteSchema{}

// ClaimQuery implements [SchemaAdapter].
func (DefaultSQLiteSchema) ClaimQuery(params KeyParams) Query {
	return Query{`INSERT INTO ` + params.Table.Quoted() + ` ("consumer", "message_id") VALUES (?, ?) ` +
		`ON CONFLICT ("consumer", "message_id") DO NOTHING`, keyArgs(params)}
}

// RecordQuery implements [SchemaAdapter].
func (DefaultSQLiteSchema) RecordQuery(params KeyParams) Query {
	return Query{`SELECT "processed_at" * 1000, CASE WHEN "dispatched_at" IS NULL THEN "produced" END FROM ` +
		params.Table.Quoted() + sqliteWhereKey, keyArgs(params)}
}

// StoreQuery implements [SchemaAdapter].
func (DefaultSQLiteSchema) StoreQuery(params StoreParams) Query {
	return Query{`UPDATE ` + params.Table.Quoted() + ` SET "produced" = ?` + sqliteWhereKey + ` RETURNING "processed_at" * 1000`,
		append([]any{params.Produced}, keyArgs(params.KeyParams)...)}
}

// MarkOpenQuery implements [SchemaAdapter].
func (DefaultSQLiteSchema) MarkOpenQuery(ProofParams) Query {
	return Query{Query: `SAVEPOINT "watermill_inbox_claimed"`}
}

// ProveOpenQuery implements [SchemaAdapter]. SQLite rolls a transaction back by itself on some errors
// (disk full, ON CONFLICT ROLLBACK); what the handler writes after that is committed statement by
// statement. The savepoint is gone then.
func (DefaultSQLiteSchema) ProveOpenQuery(ProofParams) Query {
	return Query{Query: `RELEASE "watermill_inbox_claimed"`}
}

// MarkSentQuery implements [SchemaAdapter].
func (DefaultSQLiteSchema) MarkSentQuery(params MarkSentParams) Query {
	chosen, args := sqliteFound(params.Records)
	return Query{chosen + ` UPDATE ` + params.Table.Quoted() + ` SET "dispatched_at" = ` + sqliteNow + `, "produced" = NULL ` +
		`WHERE "produced" IS NOT NULL AND ` + sqliteChosen, args}
}

// sqliteFound names the records as they were found, for sqliteChosen.
func sqliteFound(records []inbox.Found) (with string, args []any) {
	for _, f := range records {
		args = append(args, f.Key.Consumer, f.Key.MessageID, f.ProcessedAt.UnixMilli())
	}
	values := strings.TrimSuffix(strings.Repeat("(?, ?, ?), ", len(records)), ", ")
	return `WITH chosen ("consumer", "message_id", "processed_at") AS (VALUES ` + values + `)`, args
}

// CheckQuery implements [SchemaAdapter].
func (DefaultSQLiteSchema) CheckQuery(params CheckParams) Query {
	schema := params.Table.Schema()
	if schema == "" {
		schema = "main"
	}
	// Both names are identifiers, see ParseTable.
	return Query{Query: strings.NewReplacer("$table", params.Table.Name(), "$schema", schema).Replace(sqliteCheck)}
}

// SchemaInitializingQueries implements [SchemaAdapter].
func (DefaultSQLiteSchema) SchemaInitializingQueries(params SchemaInitializingQueriesParams) []Query {
	// CREATE INDEX names the schema at the index, not at the table.
	index := Table{schema: params.Table.Schema(), name: params.Table.Name() + indexSuffix}
	return schemaQueries("sqlite", strings.NewReplacer(
		defaultIndex+` ON "`+defaultTable+`"`, index.Quoted()+` ON "`+params.Table.Name()+`"`,
		`"`+defaultTable+`"`, params.Table.Quoted(),
	))
}

// IsBrokenByHandler implements [SchemaAdapter], for drivers whose errors tell SQLite's result code by a
// method Code() int, as modernc.org/sqlite's do.
func (DefaultSQLiteSchema) IsBrokenByHandler(err error) bool {
	var codeErr interface{ Code() int }
	if !errors.As(err, &codeErr) {
		return false
	}
	const (
		sqliteError      = 1  // no transaction is active
		sqliteConstraint = 19 // deferred foreign keys
	)
	primary := codeErr.Code() & 0xff
	return primary == sqliteError || primary == sqliteConstraint
}

// IsTransactionOver implements [SchemaAdapter]. Both statements fail when the transaction is gone, or for
// want of a lock, memory or disk; drivers that do not tell the code are believed to mean the first.
func (DefaultSQLiteSchema) IsTransactionOver(err error) bool {
	var codeErr interface{ Code() int }
	if !errors.As(err, &codeErr) {
		return true
	}
	switch codeErr.Code() & 0xff {
	case 5, 6, 7, 10, 13: // busy, locked, out of memory, I/O, full
		return false
	}
	return true
}

// SchemaQuery implements [SchemaAdapter].
func (DefaultSQLiteSchema) SchemaQuery(CheckParams) Query { return Query{} }

// sqliteNow is the schema's default of processed_at.
const sqliteNow = `CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)`

// These compare bytes whatever the columns' collation is, as the key that Check demands does.
const (
	sqliteConsumer  = `"consumer" COLLATE BINARY`
	sqliteMessageID = `"message_id" COLLATE BINARY`
	sqliteKey       = sqliteConsumer + `, ` + sqliteMessageID
	sqliteChosen    = `("consumer", "message_id") IN (SELECT "consumer", "message_id" FROM chosen) AND (` + sqliteKey + `, "processed_at") IN (SELECT * FROM chosen)` // the first by the index
	sqliteWhereKey  = ` WHERE ` + sqliteConsumer + ` = ? AND ` + sqliteMessageID + ` = ?`
)

func keyArgs(params KeyParams) []any {
	return []any{params.Key.Consumer, params.Key.MessageID}
}

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
FROM (VALUES ('consumer'), ('message_id'), ('processed_at'), ('produced'), ('dispatched_at')) AS need
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
)`
