# A second opinion on the spending, by e-mail, half a day late. It works once the account's owner has activated
# `gpucloud:managed` as a cost allocation tag; the limit that holds is gpucloud's own.
resource "aws_budgets_budget" "this" {
  count = var.alert == null ? 0 : 1

  name         = local.name
  budget_type  = "COST"
  limit_amount = format("%.2f", var.alert.monthly_usd)
  limit_unit   = "USD"
  time_unit    = "MONTHLY"
  tags         = local.tags

  cost_filter {
    name   = "TagKeyValue"
    values = [format("user:gpucloud:managed$%s", "true")]
  }

  dynamic "notification" {
    for_each = { ACTUAL = 80, FORECASTED = 100 }

    content {
      comparison_operator        = "GREATER_THAN"
      notification_type          = notification.key
      threshold                  = notification.value
      threshold_type             = "PERCENTAGE"
      subscriber_email_addresses = [var.alert.email]
    }
  }
}
