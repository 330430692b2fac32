package sql_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/integration/testdb"
	inboxsql "github.com/devmappa/watermill-inbox/sql"
)

var readOnly = &sql.TxOptions{ReadOnly: true}

const postgreSQLColumns = `consumer text NOT NULL, message_id text NOT NULL, processed_at timestamptz NOT NULL DEFAULT now()`

// The tables of unsent messages.
const (
	postgreSQLUnsent = `CREATE TABLE watermill_inbox_unsent (consumer text NOT NULL, message_id text NOT NULL, claimed_at timestamptz NOT NULL,
		stored_at timestamptz NOT NULL DEFAULT clock_timestamp(), leased_until timestamptz, topic text NOT NULL, produced bytea NOT NULL,
		PRIMARY KEY (consumer, message_id, claimed_at));`
	sqliteUnsent = `CREATE TABLE watermill_inbox_unsent (consumer text NOT NULL, message_id text NOT NULL, claimed_at integer NOT NULL,
		stored_at integer NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)), leased_until integer, topic text NOT NULL, produced blob NOT NULL,
		PRIMARY KEY (consumer, message_id, claimed_at));`
)

// Triggers, with which a claim may take no effect.
const (
	postgreSQLTrigger = `CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
		CREATE TRIGGER act BEFORE INSERT ON watermill_inbox FOR EACH ROW EXECUTE FUNCTION act()`
	sqliteTrigger = `CREATE TRIGGER act AFTER INSERT ON watermill_inbox BEGIN SELECT 1; END`
)

// Tables that would lose messages or let them run twice are refused before the first handler runs.
func TestCheckRefuses(t *testing.T) {
	t.Parallel()
	const (
		key             = `, PRIMARY KEY (consumer, message_id)`
		postgreSQLTable = `CREATE TABLE watermill_inbox (` + postgreSQLColumns + key + `); `
		postgreSQLGood  = postgreSQLTable + postgreSQLUnsent
		sqliteColumns   = `consumer text, message_id text, processed_at int DEFAULT 0`
		sqliteTable     = `CREATE TABLE watermill_inbox (` + sqliteColumns + key + `); `
		sqliteGood      = sqliteTable + sqliteUnsent
	)
	for name, c := range map[string]struct{ driver, ddl, want string }{
		"no table":                              {"postgres", `SELECT 1`, "the table does not exist"},
		"no table, but that of unsent messages": {"postgres", postgreSQLUnsent, "the table does not exist"},
		"no unique key": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (` + postgreSQLColumns + `)`, "no primary key or unique index"},
		"partial unique index": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (` + postgreSQLColumns + `); CREATE UNIQUE INDEX ON watermill_inbox (consumer, message_id) WHERE consumer <> ''`, "no primary key or unique index"},
		"invalid unique index": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (` + postgreSQLColumns + `); CREATE UNIQUE INDEX i ON watermill_inbox (consumer, message_id);
			 UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'i'::regclass`, "no primary key or unique index"},
		"key widened by a partition column": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (` + postgreSQLColumns + `, PRIMARY KEY (consumer, message_id, processed_at)) PARTITION BY RANGE (processed_at);
			 CREATE TABLE p PARTITION OF watermill_inbox DEFAULT`, "no primary key or unique index"},
		"key without the consumer": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (` + postgreSQLColumns + `, PRIMARY KEY (message_id))`, "no primary key or unique index"},
		"deferrable key": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (` + postgreSQLColumns + key + ` DEFERRABLE)`, "no primary key or unique index"},
		"key on an expression": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (` + postgreSQLColumns + `); CREATE UNIQUE INDEX ON watermill_inbox (consumer, lower(message_id))`, "no primary key or unique index"},
		"nondeterministic collation": {"postgres",
			postgreSQLUnsent + `CREATE COLLATION folding (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
			 CREATE TABLE watermill_inbox (` + strings.Replace(postgreSQLColumns, "message_id text", "message_id text COLLATE folding", 1) + key + `)`, "nondeterministic collation"},
		"uuid column, in which spellings meet": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (` + strings.Replace(postgreSQLColumns, "message_id text", "message_id uuid", 1) + key + `)`, "column message_id has type uuid"},
		"padded column": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (` + strings.Replace(postgreSQLColumns, "message_id text", "message_id char(255)", 1) + key + `)`, "column message_id has type character(255)"},
		"short column": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (` + strings.Replace(postgreSQLColumns, "message_id text", "message_id varchar(36)", 1) + key + `)`, "column message_id has type character varying(36)"},
		"missing columns": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (consumer text)`, "column message_id is missing: apply schema file 001_inbox.sql; column processed_at is missing: apply schema file 001_inbox.sql"},
		"unlogged table": {"postgres",
			postgreSQLUnsent + `CREATE UNLOGGED TABLE watermill_inbox (` + postgreSQLColumns + key + `)`, "the table is unlogged"},
		"view": {"postgres",
			postgreSQLUnsent + `CREATE TABLE t (` + postgreSQLColumns + key + `); CREATE VIEW watermill_inbox AS SELECT * FROM t`, "it is not a table"},
		"processed_at without a default": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (` + strings.Replace(postgreSQLColumns, "DEFAULT now()", "", 1) + key + `)`, "column processed_at must be NOT NULL and have a default"},
		"processed_at without a time zone": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (` + strings.Replace(postgreSQLColumns, "timestamptz NOT NULL", "timestamp NOT NULL", 1) + key + `)`, "column processed_at has type timestamp without time zone"},
		"generated column": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (` + strings.Replace(postgreSQLColumns, "DEFAULT now()", "GENERATED ALWAYS AS (timestamptz 'epoch') STORED", 1) + key + `)`, "column processed_at is generated"},
		"a unique index that is too narrow": {"postgres",
			postgreSQLGood + `CREATE UNIQUE INDEX narrow ON watermill_inbox (message_id)`, "narrow is unique on less than the key"},
		"unlogged partition": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (` + postgreSQLColumns + key + `) PARTITION BY HASH (message_id);
			 CREATE UNLOGGED TABLE p0 PARTITION OF watermill_inbox FOR VALUES WITH (MODULUS 1, REMAINDER 0)`, "the table is unlogged"},

		"a trigger before INSERT": {"postgres", postgreSQLGood + postgreSQLTrigger, "the table has the trigger act"},
		"a trigger after INSERT": {"postgres",
			postgreSQLGood + strings.Replace(postgreSQLTrigger, "BEFORE INSERT", "AFTER INSERT OR DELETE", 1), "the table has the trigger act"},
		"a trigger on the statement": {"postgres",
			postgreSQLGood + strings.Replace(postgreSQLTrigger, "EACH ROW", "EACH STATEMENT", 1), "the table has the trigger act"},
		"a trigger that replicas have always": {"postgres",
			postgreSQLGood + postgreSQLTrigger + `; ALTER TABLE watermill_inbox ENABLE ALWAYS TRIGGER act`, "the table has the trigger act"},
		"a trigger on a partition": {"postgres",
			postgreSQLUnsent + `CREATE TABLE watermill_inbox (` + postgreSQLColumns + key + `) PARTITION BY HASH (message_id);
			 CREATE TABLE p0 PARTITION OF watermill_inbox FOR VALUES WITH (MODULUS 1, REMAINDER 0); ` +
				strings.Replace(postgreSQLTrigger, "ON watermill_inbox", "ON p0", 1), "the table has the trigger act"},
		"a rule on INSERT": {"postgres",
			postgreSQLGood + `CREATE RULE swallow AS ON INSERT TO watermill_inbox DO INSTEAD NOTHING`, "the table has the rule swallow"},
		"a rule that adds to an INSERT": {"postgres",
			postgreSQLGood + `CREATE RULE note AS ON INSERT TO watermill_inbox DO ALSO INSERT INTO effects VALUES ('x')`, "the table has the rule note"},
		"a child table by inheritance": {"postgres",
			postgreSQLGood + `CREATE TABLE child () INHERITS (watermill_inbox)`, "table child inherits from it"},

		"no table of unsent messages": {"postgres", postgreSQLTable, "the table of unsent messages does not exist"},
		"the table of unsent messages is unlogged": {"postgres",
			postgreSQLTable + strings.Replace(postgreSQLUnsent, "CREATE TABLE", "CREATE UNLOGGED TABLE", 1), "the table of unsent messages is unlogged"},
		"the table of unsent messages is a view": {"postgres",
			postgreSQLTable + strings.ReplaceAll(postgreSQLUnsent, "watermill_inbox_unsent", "t") + `CREATE VIEW watermill_inbox_unsent AS SELECT * FROM t`,
			"the table of unsent messages has no primary key"},
		"unsent messages without a key": {"postgres",
			postgreSQLTable + strings.Replace(postgreSQLUnsent, ",\n\t\tPRIMARY KEY (consumer, message_id, claimed_at)", "", 1), "the table of unsent messages has no primary key on (consumer, message_id, claimed_at)"},
		"unsent messages of one claim alone": {"postgres",
			postgreSQLTable + strings.Replace(postgreSQLUnsent, "(consumer, message_id, claimed_at)", "(consumer, message_id)", 1), "the table of unsent messages has no primary key on (consumer, message_id, claimed_at)"},
		"unsent messages by another time": {"postgres",
			postgreSQLTable + strings.Replace(postgreSQLUnsent, "(consumer, message_id, claimed_at)", "(consumer, message_id, stored_at)", 1), "the table of unsent messages has no primary key on (consumer, message_id, claimed_at)"},
		"produced as text": {"postgres",
			postgreSQLTable + strings.Replace(postgreSQLUnsent, "bytea", "text", 1), "column produced of the table of unsent messages is missing or has another type than bytea"},
		"claimed_at without a time zone": {"postgres",
			postgreSQLTable + strings.Replace(postgreSQLUnsent, "claimed_at timestamptz", "claimed_at timestamp", 1), "column claimed_at of the table of unsent messages is missing or has another type than timestamp with time zone"},

		"SQLite: nothing can be rolled back":     {"sqlite journal off", sqliteGood, "journal_mode is off"},
		"SQLite: processed_at without a default": {"sqlite", sqliteUnsent + `CREATE TABLE watermill_inbox (` + strings.Replace(sqliteColumns, " DEFAULT 0", "", 1) + key + `)`, "column processed_at has no default"},
		"SQLite: a unique column that replaces":  {"sqlite", sqliteUnsent + `CREATE TABLE watermill_inbox (` + strings.Replace(sqliteColumns, "message_id text", "message_id text UNIQUE ON CONFLICT REPLACE", 1) + key + `)`, "is unique on less than the key"},
		"SQLite: no table":                       {"sqlite", `SELECT 1`, "the table does not exist"},
		"SQLite: no unique key":                  {"sqlite", sqliteUnsent + `CREATE TABLE watermill_inbox (` + sqliteColumns + `)`, "no primary key or unique index"},
		"SQLite: partial unique index": {"sqlite", sqliteUnsent + `CREATE TABLE watermill_inbox (` + sqliteColumns + `);
			 CREATE UNIQUE INDEX i ON watermill_inbox (consumer, message_id) WHERE consumer <> ''`, "no primary key or unique index"},
		"SQLite: wider key":              {"sqlite", sqliteUnsent + `CREATE TABLE watermill_inbox (` + sqliteColumns + `, PRIMARY KEY (consumer, message_id, processed_at))`, "no primary key or unique index"},
		"SQLite, collation without case": {"sqlite", sqliteUnsent + `CREATE TABLE watermill_inbox (` + strings.Replace(sqliteColumns, "message_id text", "message_id text COLLATE NOCASE", 1) + key + `)`, "no primary key or unique index"},
		"SQLite: numbers meet":           {"sqlite", sqliteUnsent + `CREATE TABLE watermill_inbox (` + strings.Replace(sqliteColumns, "message_id text", "message_id numeric", 1) + key + `)`, "column message_id has type NUMERIC"},
		"SQLite: column missing":         {"sqlite", sqliteUnsent + `CREATE TABLE watermill_inbox (consumer text, message_id text` + key + `)`, "column processed_at is missing"},
		"SQLite: a trigger after INSERT": {"sqlite", sqliteGood + sqliteTrigger, "the table has the trigger act"},
		"SQLite: a trigger that swallows": {"sqlite", sqliteGood + `CREATE TRIGGER act BEFORE INSERT ON watermill_inbox BEGIN SELECT RAISE(IGNORE); END`,
			"the table has the trigger act"},
		"SQLite: a trigger on the table in other letters": {"sqlite", sqliteGood + strings.Replace(sqliteTrigger, "watermill_inbox", "Watermill_INBOX", 1), "the table has the trigger act"},
		"SQLite: no table of unsent messages":             {"sqlite", sqliteTable, "column consumer of the table of unsent messages is missing"},
		"SQLite: unsent messages without a key": {"sqlite",
			sqliteTable + strings.Replace(sqliteUnsent, ",\n\t\tPRIMARY KEY (consumer, message_id, claimed_at)", "", 1), "the table of unsent messages has no primary key on (consumer, message_id, claimed_at)"},
		"SQLite: unsent messages of one claim alone": {"sqlite",
			sqliteTable + strings.Replace(sqliteUnsent, "(consumer, message_id, claimed_at)", "(consumer, message_id)", 1), "the table of unsent messages has no primary key on (consumer, message_id, claimed_at)"},
		"SQLite: unsent messages by another time": {"sqlite",
			sqliteTable + strings.Replace(sqliteUnsent, "(consumer, message_id, claimed_at)", "(consumer, message_id, stored_at)", 1), "the table of unsent messages has no primary key on (consumer, message_id, claimed_at)"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var db *testdb.Database
			switch c.driver {
			case "sqlite":
				db = testdb.SQLite(t)
			case "sqlite journal off":
				db = testdb.SQLiteWith(t, "_pragma=journal_mode(OFF)")
			default:
				db = testdb.PostgreSQL(t, c.driver)
			}
			db.MustExec(t, c.ddl)
			wantCheckRefuses(t, db.RepositoryWithoutSchema(t, inboxsql.Options{}), c.want)
		})
	}
	// Each column of the table of unsent messages is asked for.
	for _, column := range []string{"consumer", "message_id", "claimed_at", "stored_at", "leased_until", "topic", "produced"} {
		for driver, good := range map[string]string{"postgres": postgreSQLGood, "sqlite": sqliteGood} {
			t.Run("the table of unsent messages without "+column+", "+driver, func(t *testing.T) {
				t.Parallel()
				open := func(t testing.TB, _ string) *testdb.Database { return testdb.SQLite(t) }
				if driver == "postgres" {
					open = testdb.PostgreSQL
				}
				db := open(t, driver)
				db.MustExec(t, good+`ALTER TABLE watermill_inbox_unsent RENAME COLUMN `+column+` TO other`)
				wantCheckRefuses(t, db.RepositoryWithoutSchema(t, inboxsql.Options{}), "column "+column+" of the table of unsent messages is missing")
			})
		}
	}
}

// wantCheckRefuses fails the test unless a message is refused by a check that says so, before its handler runs.
func wantCheckRefuses(t testing.TB, repository inbox.Repository, want string) {
	t.Helper()
	handler := wrap(t, repository, inbox.Options{}, func(*message.Message) error {
		t.Error("the handler ran")
		return nil
	})
	for range 2 { // it stays refused
		_, err := handler(newMessage("1"))
		var check *inbox.CheckError
		if !errors.As(err, &check) || !strings.Contains(strings.Join(check.Problems, "; "), want) {
			t.Fatalf("the error is %v, want a *CheckError that says %q", err, want)
		}
		if !strings.Contains(want, "unsent") && strings.Contains(err.Error(), "unsent") {
			t.Fatalf("the error is %v, but nothing is wrong with the unsent messages", err)
		}
		if inbox.ShouldPoison(err) {
			t.Fatal("a wrong table would poison messages")
		}
	}
}

// A role that could claim but not store, or not mark, is refused by name of the privilege.
func TestCheckRefusesARoleWithoutAPrivilege(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ table, privilege, want string }{
		{"watermill_inbox", "INSERT", "lacks the privilege INSERT"},
		{"watermill_inbox", "SELECT", "lacks the privilege SELECT"},
		{"watermill_inbox_unsent", "INSERT", "lacks the privilege INSERT on the table of unsent messages"},
		{"watermill_inbox_unsent", "SELECT", "lacks the privilege SELECT on the table of unsent messages"},
		{"watermill_inbox_unsent", "UPDATE", "lacks the privilege UPDATE on the table of unsent messages"},
		{"watermill_inbox_unsent", "DELETE", "lacks the privilege DELETE on the table of unsent messages"},
	} {
		t.Run(c.privilege+" on "+c.table, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, "postgres")
			db.Repository(t, inboxsql.Options{})
			role := "role_" + testdb.RandomName()
			var schema string
			if err := db.QueryRow(`SELECT current_schema()`).Scan(&schema); err != nil {
				t.Fatal(err)
			}
			db.MustExec(t, `CREATE ROLE `+role+` LOGIN`)
			t.Cleanup(func() { db.MustExec(t, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
			db.MustExec(t, `GRANT USAGE ON SCHEMA `+schema+` TO `+role+`; GRANT SELECT, INSERT ON watermill_inbox TO `+role+
				`; GRANT SELECT, INSERT, UPDATE, DELETE ON watermill_inbox_unsent TO `+role)
			asRole := *db
			asRole.URL = strings.Replace(db.URL, "postgres://postgres@", "postgres://"+role+"@", 1)
			asRole.DB = asRole.Open(t)
			if err := asRole.RepositoryWithoutSchema(t, inboxsql.Options{}).Check(context.Background()); err != nil {
				t.Fatal(err)
			}
			db.MustExec(t, `REVOKE `+c.privilege+` ON `+c.table+` FROM `+role)
			wantCheckRefuses(t, asRole.RepositoryWithoutSchema(t, inboxsql.Options{}), c.want)
		})
	}
}

// A temporary table is a connection's own, so another connection would claim again what it has claimed.
func TestCheckRefusesATemporaryTable(t *testing.T) {
	t.Parallel()
	for driver, c := range map[string]struct {
		db    *testdb.Database
		table string
	}{
		"SQLite":                   {testdb.SQLite(t), "temp.inbox"},
		"SQLite, in other letters": {testdb.SQLite(t), "TEMP.inbox"},
		"PostgreSQL":               {testdb.PostgreSQL(t, "postgres"), "pg_temp.inbox"},
	} {
		repository := c.db.RepositoryWithoutSchema(t, inboxsql.Options{Table: c.table})
		var check *inbox.CheckError
		if err := repository.InitializeSchema(context.Background()); !errors.As(err, &check) || !strings.Contains(err.Error(), "temporary") {
			t.Errorf("%s: the error is %v, want a *CheckError about a temporary table", driver, err)
		}
	}
}

func TestCheckAccepts(t *testing.T) {
	t.Parallel()
	for name, ddl := range map[string]string{
		"unique index instead of a primary key": `CREATE TABLE watermill_inbox (` + postgreSQLColumns + `); CREATE UNIQUE INDEX ON watermill_inbox (message_id, consumer)`,
		"varchar(255)": strings.ReplaceAll(postgreSQLUnsent, " text ", " varchar(255) ") +
			`CREATE TABLE watermill_inbox (` + strings.ReplaceAll(postgreSQLColumns, "text", "varchar(255)") + `, PRIMARY KEY (consumer, message_id))`,
		"a trigger that is not on INSERT, and one that is disabled": `CREATE TABLE watermill_inbox (` + postgreSQLColumns + `, PRIMARY KEY (consumer, message_id)); ` +
			postgreSQLTrigger + `; ALTER TABLE watermill_inbox DISABLE TRIGGER act; CREATE TRIGGER other AFTER DELETE ON watermill_inbox FOR EACH ROW EXECUTE FUNCTION act()`,
		"a rule that is not on INSERT": `CREATE TABLE watermill_inbox (` + postgreSQLColumns + `, PRIMARY KEY (consumer, message_id));
			CREATE RULE archive AS ON DELETE TO watermill_inbox DO ALSO INSERT INTO effects VALUES ('deleted')`,
		"hash partitions on the key": `CREATE TABLE watermill_inbox (` + postgreSQLColumns + `, PRIMARY KEY (consumer, message_id)) PARTITION BY HASH (message_id);
			CREATE TABLE p0 PARTITION OF watermill_inbox FOR VALUES WITH (MODULUS 2, REMAINDER 0);
			CREATE TABLE p1 PARTITION OF watermill_inbox FOR VALUES WITH (MODULUS 2, REMAINDER 1)`,
		"a column of the next version, and one's own": `CREATE TABLE watermill_inbox (` + postgreSQLColumns + `, added_by_the_next_version text, note text DEFAULT 'x', PRIMARY KEY (consumer, message_id))`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, "postgres")
			if !strings.Contains(ddl, "watermill_inbox_unsent (") {
				db.MustExec(t, postgreSQLUnsent)
			}
			db.MustExec(t, ddl)
			a := newApp(t, db, db.RepositoryWithoutSchema(t, inboxsql.Options{}), inbox.Options{})
			a.router.AddMiddleware(a.inbox.Middleware)
			a.handle("book", "payments", func(msg *message.Message) error { return db.Write(msg.Context(), msg.UUID) })
			a.run()
			for _, id := range []string{"1", "2", "1", "3", "2"} {
				a.publish("payments", newMessage(id))
			}
			a.wantEffects("1", "2", "3")
		})
	}
}

// The check repeats until it succeeds, so a service may start before its table.
func TestCheckIsRepeatedUntilItSucceeds(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	repository := db.RepositoryWithoutSchema(t, inboxsql.Options{})
	key := inbox.Key{Consumer: "c", MessageID: "1"}
	if _, _, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: key}); err == nil {
		t.Fatal("claimed without a table")
	}
	if err := db.Repository(t, inboxsql.Options{}).Check(context.Background()); err != nil {
		t.Fatal(err)
	}
	transaction, _, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: key})
	if err != nil {
		t.Fatal(err)
	}
	if err := transaction.Rollback(); err != nil {
		t.Fatal(err)
	}
}

func TestCheckRefusesAReadOnlyServer(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.Repository(t, inboxsql.Options{})
	db.URL += "&default_transaction_read_only=on"
	db.DB = db.Open(t)
	err := db.RepositoryWithoutSchema(t, inboxsql.Options{}).Check(context.Background())
	if err == nil || !strings.Contains(err.Error(), "read-only") {
		t.Fatalf("the error is %v", err)
	}
}

func TestCheckRefusesAnotherEncoding(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "pgx")
	db.Repository(t, inboxsql.Options{})
	db.URL += "&client_encoding=LATIN1"
	db.DB = db.Open(t)
	err := db.RepositoryWithoutSchema(t, inboxsql.Options{}).Check(context.Background())
	if err == nil || !strings.Contains(err.Error(), "client_encoding is LATIN1") {
		t.Fatalf("the error is %v", err)
	}
}

func TestInitializeSchemaInTwentyInstancesAtOnce(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(testing.TB) *testdb.Database{
		"lib-pq": func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "postgres") },
		"pgx":    func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "pgx") },
		"SQLite": testdb.SQLite,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := open(t)
			var group sync.WaitGroup
			start := make(chan struct{})
			for range 20 {
				pool := db.Open(t)
				pool.SetMaxOpenConns(1)
				repository, err := inboxsql.NewRepository(pool, inboxsql.Options{SchemaAdapter: db.Adapter})
				if err != nil {
					t.Fatal(err)
				}
				if err := pool.Ping(); err != nil {
					t.Fatal(err)
				}
				group.Add(1)
				go func() {
					defer group.Done()
					<-start
					if err := repository.InitializeSchema(context.Background()); err != nil {
						t.Error(err)
					}
				}()
			}
			close(start)
			group.Wait()
		})
	}
}

// The grants of the schema file are enough, and a role that must not create may call InitializeSchema.
func TestLeastPrivilege(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.Repository(t, inboxsql.Options{})
	role := "role_" + testdb.RandomName()
	var schema string
	if err := db.QueryRow(`SELECT current_schema()`).Scan(&schema); err != nil {
		t.Fatal(err)
	}
	cleaner := role + "_cleaner"
	for _, name := range []string{role, cleaner} {
		db.MustExec(t, `CREATE ROLE `+name+` LOGIN`)
		t.Cleanup(func() { db.MustExec(t, `DROP OWNED BY `+name+`; DROP ROLE `+name) })
		db.MustExec(t, `GRANT USAGE ON SCHEMA `+schema+` TO `+name)
	}
	db.MustExec(t, `GRANT INSERT, SELECT ON effects TO `+role)

	asRole := *db
	asRole.URL = strings.Replace(db.URL, "postgres://postgres@", "postgres://"+role+"@", 1)
	asRole.DB = asRole.Open(t)
	repository := asRole.RepositoryWithoutSchema(t, inboxsql.Options{})
	if err := repository.Check(context.Background()); err == nil || !strings.Contains(err.Error(), "lacks the privilege INSERT") {
		t.Fatalf("without grants the check says %v", err)
	}
	file, err := fs.ReadFile(inboxsql.Schema, "schema/postgresql/001_inbox.sql")
	if err != nil {
		t.Fatal(err)
	}
	grants := 0
	for _, line := range strings.Split(string(file), "\n") {
		if _, grant, found := strings.Cut(line, "--   GRANT "); found {
			grant = strings.NewReplacer("your_consumer_role", role, "your_cleaner_role", cleaner).Replace(grant)
			db.MustExec(t, "GRANT "+grant)
			grants++
		}
	}
	if grants != 3 {
		t.Fatalf("%d grants in the schema file", grants)
	}
	if err := repository.InitializeSchema(context.Background()); err != nil {
		t.Fatal(err)
	}
	a := newApp(t, &asRole, repository, inbox.Options{PublishBackOff: time.Nanosecond}) // the first failure nacks
	a.router.AddMiddleware(a.inbox.Middleware)
	events := &recorder{fails: 1}
	a.router.AddHandler("book", "payments", a.broker, "events", events, func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{newMessage("event")}, asRole.Write(msg.Context(), msg.UUID)
	})
	a.run()
	a.publish("payments", newMessage("1"))
	a.wantEffects("1")
	if got := len(events.all()); got != 1 {
		t.Fatalf("%d events, want the replay", got)
	}
	a.stop()
	if records, unsent := db.Count(t, `SELECT count(*) FROM watermill_inbox`), db.Count(t, `SELECT count(*) FROM watermill_inbox_unsent`); records != 1 || unsent != 0 {
		t.Fatalf("%d records and %d that are not marked", records, unsent)
	}
	makeUnsent(t, &asRole, repository, "2")
	relayed := &recorder{}
	relay, err := inbox.NewRelay(repository, inbox.RelayOptions{Publishers: map[string]message.Publisher{"c": relayed}, Age: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	if pass, err := relay.Pass(context.Background(), "c"); err != nil || pass.Published != 1 {
		t.Fatalf("the relay's pass says %+v, %v", pass, err)
	}
	makeUnsent(t, &asRole, repository, "3")
	asCleaner := *db
	asCleaner.URL = strings.Replace(db.URL, "postgres://postgres@", "postgres://"+cleaner+"@", 1)
	asCleaner.DB = asCleaner.Open(t)
	pass, err := newCleaner(t, asCleaner.RepositoryWithoutSchema(t, inboxsql.Options{})).Pass(context.Background())
	if err != nil || pass.Deleted != 3 || pass.UnsentDeleted != 1 {
		t.Fatalf("%+v, %v", pass, err)
	}
	if got := db.Count(t, `SELECT count(*) FROM watermill_inbox_unsent`); got != 0 {
		t.Fatalf("the messages of %d records are left", got)
	}
}

func newCleaner(t *testing.T, repository inbox.Records) *inbox.Cleaner {
	t.Helper()
	c, err := inbox.NewCleaner(repository, inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: inbox.Retention{Default: time.Nanosecond}, UnsentRetention: time.Nanosecond, BatchSize: 100, BatchPause: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Several cleaners at once on a partitioned table: one works at a time, the limit holds, and what is
// young stays although its place in its partition is that of an old one in another.
func TestCleanersOnHashPartitions(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	db.MustExec(t, postgreSQLUnsent+`CREATE TABLE watermill_inbox (`+postgreSQLColumns+`, PRIMARY KEY (consumer, message_id)) PARTITION BY HASH (message_id);
		CREATE TABLE p0 PARTITION OF watermill_inbox FOR VALUES WITH (MODULUS 2, REMAINDER 0);
		CREATE TABLE p1 PARTITION OF watermill_inbox FOR VALUES WITH (MODULUS 2, REMAINDER 1);
		INSERT INTO watermill_inbox SELECT 'c', i::text, now() - interval '1 hour' * (i % 2) FROM generate_series(1, 2000) i`)
	repository := db.RepositoryWithoutSchema(t, inboxsql.Options{})
	halfHourAgo := time.Now().Add(-30 * time.Minute)
	deleted, _, err := repository.DeleteProcessed(context.Background(), inbox.DeleteProcessedParams{Consumer: "c", Before: halfHourAgo, Limit: 10})
	if err != nil || deleted != 10 {
		t.Fatalf("deleted %d, %v, want 10", deleted, err)
	}
	var group sync.WaitGroup
	var total atomic.Int32
	for range 4 {
		group.Add(1)
		go func() {
			defer group.Done()
			for {
				deleted, _, err := repository.DeleteProcessed(context.Background(), inbox.DeleteProcessedParams{Consumer: "c", Before: halfHourAgo, Limit: 50})
				if errors.Is(err, inbox.ErrCleaning) {
					continue
				}
				if err != nil {
					t.Error(err)
				}
				if deleted == 0 {
					return
				}
				total.Add(int32(deleted))
			}
		}()
	}
	group.Wait()
	if got := total.Load(); got != 990 {
		t.Errorf("%d deleted, want 990", got)
	}
	if got := db.Count(t, `SELECT count(*) FROM watermill_inbox`); got != 1000 {
		t.Errorf("%d records are left, want the 1000 young ones", got)
	}
}

// A handler may change the search path, even of its pooled session: the inbox stays where it was found.
func TestSearchPathOfTheHandler(t *testing.T) {
	t.Parallel()
	drivers(t, func(t *testing.T, driver string) {
		db := testdb.PostgreSQL(t, driver)
		db.SetMaxOpenConns(1)
		var home string
		if err := db.QueryRow(`SELECT current_schema()`).Scan(&home); err != nil {
			t.Fatal(err)
		}
		tenant := "tenant_" + testdb.RandomName()
		db.MustExec(t, `CREATE SCHEMA `+tenant)
		t.Cleanup(func() {
			db.MustExec(t, `SET search_path = `+home)
			db.MustExec(t, `DROP SCHEMA `+tenant+` CASCADE`)
		})
		db.MustExec(t, `CREATE TABLE `+tenant+`.watermill_inbox (`+postgreSQLColumns+`, PRIMARY KEY (consumer, message_id));
			`+strings.Replace(postgreSQLUnsent, "watermill_inbox_unsent", tenant+".watermill_inbox_unsent", 1))
		for _, set := range []string{"SET LOCAL", "SET"} {
			runs := 0
			a := newApp(t, db, db.Repository(t, inboxsql.Options{}), inbox.Options{})
			a.router.AddMiddleware(a.inbox.Middleware)
			a.router.AddHandler("book", "payments", a.broker, "events", &discard{}, func(msg *message.Message) ([]*message.Message, error) {
				runs++
				tx, _ := inboxsql.TxFromContext(msg.Context())
				_, err := tx.ExecContext(msg.Context(), set+` search_path = `+tenant)
				return []*message.Message{newMessage("event")}, err
			})
			a.run()
			a.publish("payments", newMessage(set))
			a.publish("payments", newMessage(set))
			a.stop()
			if runs != 1 {
				t.Errorf("%s: the handler ran %d times", set, runs)
			}
			if got := db.Count(t, `SELECT count(*) FROM `+tenant+`.watermill_inbox`); got != 0 {
				t.Errorf("%s: %d claims in the tenant's table", set, got)
			}
			if got := db.Count(t, `SELECT (SELECT count(*) FROM `+tenant+`.watermill_inbox_unsent) + (SELECT count(*) FROM `+home+`.watermill_inbox_unsent)`); got != 0 {
				t.Errorf("%s: %d records are unsent", set, got)
			}
			db.MustExec(t, `SET search_path = `+home)
		}
	})
}

// The schema files work under another name and in another schema.
func TestTableOption(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	schema := "other_" + testdb.RandomName()
	db.MustExec(t, `CREATE SCHEMA `+schema)
	t.Cleanup(func() { db.MustExec(t, `DROP SCHEMA `+schema+` CASCADE`) })
	for _, table := range []string{schema + ".watermill_inbox", schema + ".Inbox2", "inbox3"} {
		repository := db.Repository(t, inboxsql.Options{Table: table})
		transaction, record, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: "1"}})
		if err != nil || record != nil {
			t.Fatalf("%s: %v, %v", table, record, err)
		}
		if err := transaction.Commit(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	if got := db.Count(t, `SELECT count(*) FROM pg_indexes WHERE schemaname = $1`, schema); got != 6 {
		t.Errorf("%d indexes in the schema, want a primary key and one on processed_at for each of two tables, and a primary key of the unsent messages of each", got)
	}
	if got := db.Count(t, `SELECT count(*) FROM inbox3`); got != 1 {
		t.Errorf("%d records", got)
	}
}

// "0 rows affected" is not yet a duplicate: a trigger or a rule that somebody has made since the check may have swallowed
// the row, or written it itself, so that our own transaction sees it. A new message gets an error then: its handler does
// not run, and it is not acknowledged.
func TestATriggerMakesNoDuplicate(t *testing.T) {
	t.Parallel()
	trigger := func(body string) string {
		return `CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN ` + body + ` END $$;
			CREATE TRIGGER act BEFORE INSERT ON watermill_inbox FOR EACH ROW WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION act()`
	}
	const insert = `INSERT INTO watermill_inbox (consumer, message_id) VALUES (NEW.consumer, NEW.message_id); `
	cases := map[string]string{
		"a trigger swallows the row":                   trigger(`RETURN NULL;`),
		"a trigger writes the row":                     trigger(insert + `RETURN NEW;`),
		"a trigger writes the row and swallows it":     trigger(insert + `RETURN NULL;`),
		"a trigger with an EXCEPTION block writes it":  trigger(`BEGIN ` + insert + `EXCEPTION WHEN OTHERS THEN NULL; END; RETURN NEW;`),
		"a trigger with one writes it and swallows it": trigger(`BEGIN ` + insert + `EXCEPTION WHEN OTHERS THEN NULL; END; RETURN NULL;`),
		"a trigger swallows an error of its own":       trigger(insert + `BEGIN PERFORM 1 / 0; EXCEPTION WHEN OTHERS THEN NULL; END; RETURN NULL;`),
		"a trigger routes the row to a child table": `CREATE TABLE child () INHERITS (watermill_inbox); ` +
			trigger(`INSERT INTO child VALUES (NEW.*); RETURN NULL;`),
		"a rule swallows the row": `CREATE RULE act AS ON INSERT TO watermill_inbox DO INSTEAD NOTHING`,
	}
	for name, ddl := range cases {
		for _, way := range testdb.Ways {
			t.Run(name+", "+way, func(t *testing.T) {
				t.Parallel()
				db := testdb.PostgreSQL(t, "postgres")
				service := db.Way(t, way, db.URL, 1)
				if err := service.InitializeSchema(context.Background()); err != nil {
					t.Fatal(err)
				}
				refuses := inbox.ErrNoRecord
				if strings.HasPrefix(name, "a rule") {
					refuses = nil // PostgreSQL itself refuses ON CONFLICT with a rule
				}
				newMessageIsNoDuplicate(t, db, service, refuses, ddl, map[bool]string{true: `DROP RULE act ON watermill_inbox`, false: `DROP TRIGGER act ON watermill_inbox`}[refuses == nil])
			})
		}
	}
	for name, ddl := range map[string]string{
		"a trigger swallows the row": `CREATE TRIGGER act BEFORE INSERT ON watermill_inbox BEGIN SELECT RAISE(IGNORE); END`,
		"a trigger writes the row":   `CREATE TRIGGER act BEFORE INSERT ON watermill_inbox BEGIN INSERT INTO watermill_inbox (consumer, message_id) VALUES (NEW.consumer, NEW.message_id); END`,
		"a trigger writes the row and swallows it": `CREATE TRIGGER act BEFORE INSERT ON watermill_inbox BEGIN
			INSERT INTO watermill_inbox (consumer, message_id) VALUES (NEW.consumer, NEW.message_id); SELECT RAISE(IGNORE); END`,
	} {
		t.Run(name+", SQLite", func(t *testing.T) {
			t.Parallel()
			db := testdb.SQLite(t)
			db.SetMaxOpenConns(1)
			newMessageIsNoDuplicate(t, db, db.Repository(t, inboxsql.Options{}), inbox.ErrNoRecord, ddl, `DROP TRIGGER act`)
		})
	}
}

// newMessageIsNoDuplicate checks that while the statement's effect is there a new message is refused, with this error if
// there is one, and that a processed one does not run again.
func newMessageIsNoDuplicate(t testing.TB, db *testdb.Database, repository inbox.Repository, want error, ddl, undo string) {
	t.Helper()
	runs := 0
	handler := wrap(t, repository, inbox.Options{}, func(*message.Message) error { runs++; return nil })
	if _, err := handler(newMessage("before")); err != nil || runs != 1 {
		t.Fatal(runs, err)
	}
	db.MustExec(t, ddl)
	for range 3 { // also the redeliveries
		_, err := handler(newMessage("new"))
		if err == nil || want != nil && !errors.Is(err, want) {
			t.Fatalf("the error is %v, want %v", err, want)
		}
		if inbox.ShouldPoison(err) {
			t.Fatalf("it would be poisoned: %v", err)
		}
	}
	// The trigger that writes the row violates the key then. That is no duplicate either, but it stays with the broker.
	if _, err := handler(newMessage("before")); err != nil && inbox.ShouldPoison(err) {
		t.Errorf("the copy of a processed message would be poisoned: %v", err)
	}
	if runs != 1 {
		t.Errorf("the handler ran %d times", runs-1)
	}
	if got := db.Count(t, `SELECT count(*) FROM watermill_inbox`); got != 1 {
		t.Errorf("%d records, want that of before alone", got)
	}
	db.MustExec(t, undo)
	for range 2 {
		if _, err := handler(newMessage("new")); err != nil {
			t.Fatal(err)
		}
	}
	if runs != 2 {
		t.Errorf("the handler ran %d times after the repair, want once", runs-1)
	}
}

func TestARealErrorIsNotADuplicate(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		open func(testing.TB) *testdb.Database
		ddl  string
	}{
		"PostgreSQL": {func(t testing.TB) *testdb.Database { return testdb.PostgreSQL(t, "postgres") }, `ALTER TABLE watermill_inbox ADD COLUMN required text NOT NULL`},
		"SQLite": {testdb.SQLite, `DROP TABLE watermill_inbox; CREATE TABLE watermill_inbox (consumer text NOT NULL, message_id text NOT NULL,
			processed_at integer NOT NULL DEFAULT 0, required text NOT NULL, PRIMARY KEY (consumer, message_id))`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := c.open(t)
			repository := db.Repository(t, inboxsql.Options{})
			db.MustExec(t, c.ddl)
			if _, record, err := repository.Claim(context.Background(), inbox.ClaimParams{Key: inbox.Key{Consumer: "c", MessageID: "1"}}); err == nil {
				t.Fatalf("no error; record %v", record)
			}
			if inUse := db.Stats().InUse; inUse != 0 {
				t.Fatalf("%d connections in use", inUse)
			}
		})
	}
}

func TestNewRepositoryRefuses(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t)
	for name, options := range map[string]inboxsql.Options{
		"no adapter":       {},
		"read-only":        {SchemaAdapter: db.Adapter, TxOptions: readOnly},
		"quote in table":   {SchemaAdapter: db.Adapter, Table: `a"b`},
		"two dots":         {SchemaAdapter: db.Adapter, Table: `a.b.c`},
		"empty schema":     {SchemaAdapter: db.Adapter, Table: `.b`},
		"too long":         {SchemaAdapter: db.Adapter, Table: strings.Repeat("a", 60)},
		"leading digit":    {SchemaAdapter: db.Adapter, Table: `1a`},
		"NUL":              {SchemaAdapter: db.Adapter, Table: "a\x00"},
		"statement":        {SchemaAdapter: db.Adapter, Table: `a; DROP TABLE b`},
		"trailing newline": {SchemaAdapter: db.Adapter, Table: "a\n"},
	} {
		if _, err := inboxsql.NewRepository(db.DB, options); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := inboxsql.NewRepository(nil, inboxsql.Options{SchemaAdapter: db.Adapter}); err == nil {
		t.Error("nil pool: no error")
	}
}

// obedient embeds an adapter of ours and changes a part of it.
type obedient struct {
	inboxsql.DefaultPostgreSQLSchema
}

// A claim of another shape is another guarantee, so only the adapters of the package are taken, as they are.
func TestNewRepositoryRefusesOtherAdapters(t *testing.T) {
	t.Parallel()
	db := testdb.PostgreSQL(t, "postgres")
	for _, adapter := range []inboxsql.SchemaAdapter{obedient{}, &obedient{}, &inboxsql.DefaultPostgreSQLSchema{}, (*inboxsql.DefaultSQLiteSchema)(nil)} {
		if _, err := inboxsql.NewRepository(db.DB, inboxsql.Options{SchemaAdapter: adapter}); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%T", adapter)) {
			t.Errorf("%T: the error is %v", adapter, err)
		}
	}
}

// While a fault hides the table or makes Check fail, InitializeSchema makes no second one in another schema of the
// search path: it would know of no message that was processed.
func TestInitializeSchemaMakesNoSecondTable(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]struct{ begin, end string }{
		"the table is unlogged":           {`ALTER TABLE öff_%[1]s.watermill_inbox SET UNLOGGED`, `ALTER TABLE öff_%[1]s.watermill_inbox SET LOGGED`},
		"a privilege is missing":          {`REVOKE INSERT ON öff_%[1]s.watermill_inbox FROM role_%[1]s`, `GRANT INSERT ON öff_%[1]s.watermill_inbox TO role_%[1]s`},
		"unsent messages are unlogged":    {`ALTER TABLE öff_%[1]s.watermill_inbox_unsent SET UNLOGGED`, `ALTER TABLE öff_%[1]s.watermill_inbox_unsent SET LOGGED`},
		"unsent messages are not for us":  {`REVOKE UPDATE ON öff_%[1]s.watermill_inbox_unsent FROM role_%[1]s`, `GRANT UPDATE ON öff_%[1]s.watermill_inbox_unsent TO role_%[1]s`},
		"unsent messages have no table":   {`ALTER TABLE öff_%[1]s.watermill_inbox_unsent RENAME TO away`, `ALTER TABLE öff_%[1]s.away RENAME TO watermill_inbox_unsent`},
		"the schema's USAGE is missing":   {`REVOKE USAGE ON SCHEMA öff_%[1]s FROM role_%[1]s`, `GRANT USAGE ON SCHEMA öff_%[1]s TO role_%[1]s`},
		"the server is read-only for us":  {`ALTER ROLE role_%[1]s SET default_transaction_read_only = on`, `ALTER ROLE role_%[1]s RESET default_transaction_read_only`},
		"nothing, and the table is empty": {`SELECT 1`, `SELECT 1`},
	} {
		for _, way := range testdb.Ways {
			t.Run(name+", "+way, func(t *testing.T) {
				t.Parallel()
				db, id := testdb.PostgreSQL(t, "postgres"), testdb.RandomName()
				exec := func(statement string) { db.MustExec(t, strings.ReplaceAll(statement, "%[1]s", id)) }
				exec(`CREATE ROLE role_%[1]s LOGIN; CREATE SCHEMA öff_%[1]s; CREATE SCHEMA svc_%[1]s AUTHORIZATION role_%[1]s;
					GRANT USAGE ON SCHEMA öff_%[1]s TO role_%[1]s`)
				t.Cleanup(func() {
					exec(`DROP SCHEMA öff_%[1]s, svc_%[1]s CASCADE; DROP OWNED BY role_%[1]s; DROP ROLE role_%[1]s`)
				})
				owner := db.Way(t, "postgres", strings.Replace(db.URL, "search_path=", "search_path="+url.QueryEscape("öff_"+id)+"%2C", 1), 1)
				if err := owner.InitializeSchema(context.Background()); err != nil {
					t.Fatal(err)
				}
				exec(`GRANT INSERT, SELECT ON öff_%[1]s.watermill_inbox TO role_%[1]s; GRANT INSERT, SELECT, UPDATE, DELETE ON öff_%[1]s.watermill_inbox_unsent TO role_%[1]s`)
				address := strings.Replace(strings.Replace(db.URL, "search_path=", "search_path=svc_"+id+"%2C"+url.QueryEscape("öff_"+id)+"%2C", 1), "postgres://postgres@", "postgres://role_"+id+"@", 1)
				run := func() (runs int) {
					service := db.Way(t, way, address, 2)
					initErr := service.InitializeSchema(context.Background())
					handler := wrap(t, service, inbox.Options{}, func(*message.Message) error { runs++; return nil })
					if _, err := handler(newMessage("payment")); (err != nil) != (initErr != nil) {
						t.Errorf("InitializeSchema: %v, the message: %v", initErr, err)
					}
					return runs
				}
				if runs := run(); runs != 1 {
					t.Fatalf("the handler ran %d times", runs)
				}
				exec(fault.begin)
				if runs := run(); runs != 0 {
					t.Errorf("the handler ran %d times during the fault", runs)
				}
				exec(fault.end)
				if runs := run(); runs != 0 {
					t.Errorf("the copy ran %d times after the repair", runs)
				}
				if got := db.Count(t, `SELECT count(*) FROM pg_class WHERE relname LIKE 'watermill_inbox%' AND relnamespace = $1::regnamespace`, "svc_"+id); got != 0 {
					t.Error("there is a second table")
				}
			})
		}
	}
}

// What a handler leaves in the session changes neither what a later message's id means nor whether it can be claimed.
func TestSessionSettingsDoNotChangeTheKey(t *testing.T) {
	t.Parallel()
	for _, way := range testdb.Ways {
		for _, setting := range []string{`client_encoding = LATIN1`, `standard_conforming_strings = off`, `backslash_quote = off`} {
			t.Run(way+", "+setting, func(t *testing.T) {
				t.Parallel()
				db := testdb.PostgreSQL(t, "postgres")
				service, other := db.Way(t, way, db.URL, 1), db.Way(t, "postgres", db.URL, 1)
				if err := service.InitializeSchema(context.Background()); err != nil {
					t.Fatal(err)
				}
				first := wrap(t, service, inbox.Options{}, func(msg *message.Message) error {
					return service.Exec(msg.Context(), `SET SESSION `+setting)
				})
				if _, err := first(newMessage("first")); err != nil {
					t.Fatal(err)
				}
				ids := []string{`plain`, `é`, `€\u0041`, `it's`, `a\'b`, "line\nend\x01", `🙂`, `''`}
				for i, on := range []inbox.Repository{service, other, service} {
					runs := 0
					handler := wrap(t, on, inbox.Options{}, func(*message.Message) error { runs++; return nil })
					for _, id := range ids {
						if _, err := handler(newMessage(id)); err != nil {
							t.Fatalf("%q: %v", id, err)
						}
					}
					if i == 0 && runs != len(ids) || i > 0 && runs != 0 {
						t.Fatalf("%d runs in round %d", runs, i)
					}
				}
				for _, id := range ids {
					if got := db.Count(t, `SELECT count(*) FROM watermill_inbox WHERE message_id = $1`, id); got != 1 {
						t.Errorf("%q is stored %d times", id, got)
					}
				}
				if got := db.Count(t, `SELECT count(*) FROM watermill_inbox`); got != len(ids)+1 {
					t.Errorf("%d records, want %d", got, len(ids)+1)
				}
			})
		}
	}
}

// Row level security may hide records from the role: a claim that another one has made, or what the cleaner deletes.
func TestCheckRefusesRowLevelSecurity(t *testing.T) {
	t.Parallel()
	for table, want := range map[string]string{
		"watermill_inbox":        "row level security is active for the role on the table:",
		"watermill_inbox_unsent": "row level security is active for the role on the table of unsent messages:",
	} {
		t.Run(table, func(t *testing.T) {
			t.Parallel()
			db := testdb.PostgreSQL(t, "postgres")
			db.Repository(t, inboxsql.Options{})
			role := "role_" + testdb.RandomName()
			var schema string
			if err := db.QueryRow(`SELECT current_schema()`).Scan(&schema); err != nil {
				t.Fatal(err)
			}
			db.MustExec(t, `CREATE ROLE `+role+` LOGIN`)
			t.Cleanup(func() { db.MustExec(t, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
			db.MustExec(t, `GRANT USAGE ON SCHEMA `+schema+` TO `+role+`; GRANT ALL ON watermill_inbox, watermill_inbox_unsent TO `+role)
			db.MustExec(t, `ALTER TABLE `+table+` ENABLE ROW LEVEL SECURITY; CREATE POLICY seen ON `+table+` FOR SELECT USING (true);
				CREATE POLICY made ON `+table+` FOR INSERT WITH CHECK (true)`)
			asRole := *db
			asRole.URL = strings.Replace(db.URL, "postgres://postgres@", "postgres://"+role+"@", 1)
			asRole.DB = asRole.Open(t)
			repository := asRole.RepositoryWithoutSchema(t, inboxsql.Options{})
			var check *inbox.CheckError
			if err := repository.Check(context.Background()); !errors.As(err, &check) || !strings.Contains(err.Error(), want) {
				t.Fatalf("the error is %v, want a *CheckError that says %q", err, want)
			}
			db.MustExec(t, `ALTER ROLE `+role+` BYPASSRLS`)
			if err := repository.Check(context.Background()); err != nil {
				t.Fatalf("a role that bypasses it is refused: %v", err)
			}
		})
	}
}

func TestCheckRefusesAReadOnlyFile(t *testing.T) {
	t.Parallel()
	for driver, parameters := range map[string]string{"sqlite": "_pragma=busy_timeout(100)", "sqlite3": "_busy_timeout=100"} {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			db := testdb.SQLiteBy(t, driver, parameters)
			writable := db.Repository(t, inboxsql.Options{})
			reading := *db
			reading.URL = db.URL + "&mode=ro"
			reading.DB = reading.Open(t)
			wantCheckRefuses(t, reading.RepositoryWithoutSchema(t, inboxsql.Options{}), "the database is read-only")

			// A writer that takes long does not make it one.
			tx, err := db.Begin()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = tx.Rollback() }()
			if _, err := tx.Exec(`INSERT INTO effects VALUES ('first')`); err != nil {
				t.Fatal(err)
			}
			if err := writable.Check(context.Background()); err != nil {
				t.Fatal(err)
			}
		})
	}
}
