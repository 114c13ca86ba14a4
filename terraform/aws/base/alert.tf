# A second opinion on the spending, by e-mail or through SNS, half a day late. It works once the account's owner has
# activated `gpucloud:managed` as a cost allocation tag; the limit that holds is gpucloud's own.
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
    for_each = [["ACTUAL", 50], ["ACTUAL", 80], ["ACTUAL", 100], ["FORECASTED", 100]] # AWS takes five at the most

    content {
      comparison_operator        = "GREATER_THAN"
      notification_type          = notification.value[0]
      threshold                  = notification.value[1]
      threshold_type             = "PERCENTAGE"
      subscriber_email_addresses = compact([var.alert.email])
      subscriber_sns_topic_arns  = compact([var.alert.topic])
    }
  }
}
